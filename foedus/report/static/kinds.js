"use strict";

// The kinds of charts. A kind says which axes there are to choose from, what its legend lists, and
// draws: an SVG, and the series of points that hover and arrow keys go to. A point has its place in
// pixels (px, py), a title, and rows of label and value. Names come from files that nobody checked:
// they only ever become text nodes.

/** Fixed decimals as Python writes them: exact halves go to the even digit. */
function fixed(value, decimals) {
  const scaled = Math.abs(value) * 10 ** decimals, below = Math.floor(scaled);
  const half = scaled - below === 0.5 && Number.isInteger(value * 2 ** (decimals + 1));
  if (half && below % 2 === 0) return (Math.sign(value) * below / 10 ** decimals).toFixed(decimals);
  return value.toFixed(decimals);
}

function grouped(text) {
  return text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

function exponential(value, decimals) {
  const [digits, exponent] = value.toExponential(decimals).split("e");
  const power = Math.abs(Number(exponent));
  return `${digits}e${exponent[0]}${power < 10 ? "0" : ""}${power}`;
}

/** A number as the tables write it: the function of the same name in charts.py. */
function written(value, form) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (form === "count") return grouped(fixed(value, 0));
  if (form === "cost") {
    if (value === 0 || value >= 99.95) return grouped(fixed(value, 0));
    if (value >= 0.0095) return fixed(value, value >= 9.995 ? 1 : 2);
    const short = Number(value.toPrecision(2));
    return Math.abs(short) < 1e-4 ? exponential(short) : String(short);
  }
  if (size !== 0 && size < 0.00095) return exponential(value, 2);
  return fixed(value, Math.max(0, 4 - Math.trunc(Math.log10(Math.max(size, 1)))));
}

function shortened(name, most) {
  const text = name.split(/\s+/).join(" ").trim();
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const finite = (value) => value !== null && Number.isFinite(value);

/** Whether values are positive, and range widely enough for a logarithmic axis to show more. */
const wide = (values) => values.length > 0 && d3.min(values) > 0 && d3.max(values) > 5 * d3.min(values);

/** Options of an axis: ticks at integers only where its numbers count something. */
function axis(type, label, form, extra = {}) {
  const options = {type, label, labelArrow: "none", grid: true, ...extra};
  if (type === "log") return {...options, tickFormat: "~g"};
  if (form === "count") options.tickFormat = (v) => (Number.isInteger(v) ? grouped(String(v)) : "");
  return options;
}

// -- lines ------------------------------------------------------------------------------------------

/** The points of a line on the chosen axes; a level is a line that does not depend on x. */
function pointsOf(line, view, widest) {
  const xs = line.x[view.x] ?? [], ys = line.y[view.y] ?? [];
  const low = line.low[view.y] ?? [], high = line.high[view.y] ?? [], remarks = line.remarks[view.y] ?? [];
  let points = xs.map((x, i) => ({x, y: ys[i], low: low[i], high: high[i], remark: remarks[i]}));
  points = points.filter((p) => finite(p.x) && finite(p.y));
  const level = widest > 0 && points.length > 0 && points.every((p) => p.x === points[0].x);
  if (level) points = points.slice(-1);
  points = points.filter((p) => (level || !view.log.x || p.x > 0) && (!view.log.y || p.y > 0));
  return {points, level};
}

const extentOf = (lines, key) => d3.extent(lines.flatMap((l) => l.x[key] ?? []).filter(finite));

const lines = {
  weight: [1, 1],
  legend: (data) => data.lines,

  axes: (data) => data.axes,

  canBeLog(data, view, which) {
    const key = which === "x" ? view.x : view.y;
    const values = data.lines.flatMap((l) => l[which][key] ?? []).filter(finite);
    return which === "x" ? values.some((v) => v > 0) : values.every((v) => v > 0);
  },

  canCloseUp: (data, view) => data.close_up !== null && view.y === data.axes.y[0],

  draw(data, view, width) {
    const [from, to] = extentOf(data.lines, view.x), marks = [], series = [];
    const shown = data.lines.map((line) => ({line, look: data.looks[line.name], ...pointsOf(line, view, data.levels ? to - from : 0)}));
    const target = view.y === data.axes.y[0] ? data.target : null;
    if (target !== null && !(view.log.y && target <= 0)) {
      const place = {y: [target], text: ["target"], frameAnchor: "left", dx: 4, dy: -7, fill: "currentColor", fillOpacity: 0.7};
      marks.push(Plot.ruleY([target], {stroke: "currentColor", strokeOpacity: 0.55}), Plot.text([target], place));
    }
    shown.forEach(({line, look, points, level}, i) => {
      if (view.hidden.has(i) || points.length === 0) return;
      const stroke = {stroke: look.color, strokeWidth: line.reference ? 1.3 : 2, strokeDasharray: look.dash || null, clip: view.close};
      if (level) {
        marks.push(Plot.ruleY([points[0].y], stroke));
      } else {
        const every = Math.max(1, Math.floor(points.length / 7)), first = Math.floor((i * every) / 4) % every;
        const marked = points.filter((_, k) => k % every === first);
        const dot = {x: "x", y: "y", fill: look.color, r: 3.2, symbol: look.symbol, clip: view.close};
        const banded = points.filter((p) => finite(p.low) && finite(p.high) && (!view.log.y || p.low > 0));
        const band = {x: "x", y1: "low", y2: "high", fill: look.color, fillOpacity: 0.15, clip: view.close};
        marks.push(Plot.areaY(banded, band), Plot.lineY(points, {x: "x", y: "y", ...stroke}), Plot.dot(marked, dot));
      }
    });
    const height = clamp(width * 0.6, 240, 420);
    const svg = Plot.plot({
      className: "plot", width, height, marginLeft: 58, marginBottom: 40, marginRight: 16, marks,
      x: axis(view.log.x ? "log" : "linear", data.labels[view.x], data.forms[view.x], {labelAnchor: "center"}),
      y: axis(view.log.y ? "log" : "linear", data.labels[view.y], data.forms[view.y], view.close ? {domain: data.close_up} : {nice: true}),
    });
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    shown.forEach(({line, points, level}, i) => {
      if (view.hidden.has(i) || x === undefined || y === undefined) return;
      series.push(points.map((p) => ({
        px: level ? width - 16 : x.apply(p.x), py: y.apply(p.y), title: nameOf(line),
        rows: rowsOf(data, view, p),
      })).filter((p) => !view.close || (p.py >= 0 && p.py <= height)));
    });
    return {svg, series, hairline: true};
  },
};

function nameOf(line) {
  return line.note ? `${line.name} (${line.note})` : line.name;
}

function rowsOf(data, view, p) {
  const rows = [[data.labels[view.y], written(p.y, data.forms[view.y])]];
  if (finite(p.low) && finite(p.high) && p.low < p.high) {
    rows.push(["from", `${written(p.low, data.forms[view.y])} to ${written(p.high, data.forms[view.y])}`]);
  }
  if (p.remark) rows.push(["", p.remark]);
  return [...rows, [data.labels[view.x], written(p.x, data.forms[view.x])]];
}

// -- bars -------------------------------------------------------------------------------------------

/** Rows from top to bottom, with their names at the left. */
function rowAxis(names, width, rowHeight) {
  const longest = d3.max(names, (name) => name.length) ?? 0;
  const margin = clamp(longest * 7 + 14, 40, width * 0.36), most = Math.floor((margin - 14) / 6.6);
  const every = Math.ceil(14 / rowHeight), ticks = d3.range(0, names.length, every);
  const labels = Plot.axisY(ticks, {tickFormat: (i) => shortened(names[i], most), tickSize: 0, label: null});
  return {margin, labels, y: {domain: [-0.5, names.length - 0.5], reverse: true, label: null, type: "linear"}};
}

const bars = {
  weight: [0, 1],
  legend: () => [],
  axes: () => ({x: [], y: []}),
  canBeLog: (data, view, which) => which === "x" && wide(data.bars.map((b) => b.value).filter(finite)),
  canCloseUp: () => false,

  draw(data, view, width) {
    const names = data.bars.map((b) => b.name), form = data.forms.value;
    const rowHeight = clamp(560 / names.length, 8, 28), rows = rowAxis(names, width, rowHeight);
    const values = data.bars.map((b) => b.value).filter(finite);
    const base = view.log.x ? d3.min(values) / 2 : 0;
    const drawn = data.bars.map((b, i) => ({...b, i, text: written(b.value, form)})).filter((b) => finite(b.value));
    const marks = [
      rows.labels,
      Plot.rect(drawn, {
        x1: base, x2: "value", y1: (b) => b.i - 0.4, y2: (b) => b.i + 0.4,
        fill: (b) => data.looks[b.reference ? "reference" : "bars"].color, fillOpacity: (b) => (b.reference ? 0.45 : 1),
      }),
    ];
    if (rowHeight >= 14) {
      marks.push(Plot.text(drawn, {x: (b) => Math.max(b.value, base), y: "i", text: "text", textAnchor: "start", dx: 5}));
    }
    if (data.level !== null) {
      const [name, value] = data.level;
      marks.push(Plot.ruleX([value], {stroke: "#D55E00", strokeWidth: 1.6, strokeDasharray: "6 3"}));
      const right = value > d3.max(values, Math.abs) / 2;
      const beside = right ? {textAnchor: "end", dx: -4} : {textAnchor: "start", dx: 4};
      marks.push(Plot.text([value], {x: [value], y: [-0.5], text: [name], dy: -6, ...beside}));
    }
    const svg = Plot.plot({
      className: "plot", width, height: rowHeight * names.length + 70, marks, y: rows.y,
      marginLeft: rows.margin, marginRight: 64, marginBottom: 40, marginTop: 22, color: {type: "identity"}, opacity: {type: "identity"},
      x: axis(view.log.x ? "log" : "linear", data.label, form, {labelAnchor: "center"}),
    });
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    const series = drawn.map((b) => [{
      px: x.apply(b.value), py: y.apply(b.i), title: b.name,
      rows: [[data.label, b.text], ...(b.note ? [["", b.note]] : [])],
    }]);
    return {svg, series};
  },
};

// -- dots -------------------------------------------------------------------------------------------

/** Vertical offsets in pixels, so that dots lie beside each other where there is room. */
function swarm(places, radius, half) {
  const order = d3.sort(d3.range(places.length), (i) => places[i]), offsets = new Array(places.length).fill(0);
  order.forEach((i, at) => {
    const near = [];
    for (let k = at - 1; k >= 0 && places[i] - places[order[k]] < 2 * radius; k -= 1) near.push(order[k]);
    const free = (dy) => near.every((j) => Math.hypot(places[i] - places[j], dy - offsets[j]) >= 2 * radius);
    const tried = d3.range(0, half, radius / 2).flatMap((dy) => [dy, -dy]);
    offsets[i] = tried.find(free) ?? half * Math.sin(2.4 * at); // no room: they cover each other
  });
  return offsets;
}

const dots = {
  weight: [1, 1],
  legend: () => [],
  axes: () => ({x: [], y: []}),
  canBeLog: (data, view, which) => which === "x" && wide(data.groups.flatMap((g) => g.values).filter(finite)),
  canCloseUp: () => false,

  draw(data, view, width) {
    const names = data.groups.map((g) => g.name), rowHeight = 56, form = data.forms.value;
    const rows = rowAxis(names, width, rowHeight), type = view.log.x ? "log" : "linear";
    const all = data.groups.flatMap((g) => g.values).filter(finite), marginRight = 20;
    const options = axis(type, data.label, form, {labelAnchor: "center", nice: true, domain: d3.extent(all)});
    const x = Plot.scale({x: {type, domain: d3.extent(all), nice: true, range: [rows.margin, width - marginRight]}});
    const marks = [rows.labels], placed = [];
    data.groups.forEach((group, i) => {
      const look = data.looks[group.name];
      if (group.extreme === null) return placed.push([]);
      const [low, middle, high] = group.quantiles;
      marks.push(Plot.rect([0], {x1: [low], x2: [high], y1: [i - 0.3], y2: [i + 0.3], fill: look.color, fillOpacity: 0.13, rx: 4}));
      marks.push(Plot.ruleX([middle], {y1: i - 0.3, y2: i + 0.3, stroke: look.color, strokeWidth: 2.5}));
      const members = d3.zip(group.members, group.values).filter(([, value]) => finite(value));
      const radius = members.length > 150 ? 2 : 3.5;
      const offsets = swarm(members.map(([, value]) => x.apply(value)), radius, rowHeight * 0.3);
      const points = members.map(([name, value], k) => ({name, value, y: i + offsets[k] / rowHeight}));
      marks.push(Plot.dot(points, {x: "value", y: "y", r: radius, fill: look.color, fillOpacity: 0.8}));
      const extreme = points.find((p) => p.name === group.extreme), right = x.apply(extreme.value) > width / 2;
      const text = `${data.named}: ${shortened(extreme.name, 24)} (${written(extreme.value, form)})`;
      const anchor = {textAnchor: right ? "end" : "start", dx: right ? 4 : -4};
      marks.push(Plot.text([text], {x: [extreme.value], y: [i - 0.41], text: [text], ...anchor, fontSize: 11}));
      return placed.push(points.map((p) => ({...p, group: group.name})));
    });
    const svg = Plot.plot({
      className: "plot", width, height: rowHeight * names.length + 58, marks, y: rows.y, x: options,
      marginLeft: rows.margin, marginRight, marginBottom: 40, marginTop: 18,
    });
    const y = svg.scale("y");
    const series = placed.map((points) => d3.sort(points, (p) => p.value).map((p) => ({
      px: x.apply(p.value), py: y.apply(p.y), title: p.name, rows: [[data.label, written(p.value, form)], ["", p.group]],
    })));
    return {svg, series};
  },
};

// -- cells ------------------------------------------------------------------------------------------

/** Colors that begin at that of the page, or diverge from it. */
function colors(diverging) {
  const style = getComputedStyle(document.documentElement);
  const [empty, full] = ["--wash", "--full"].map((name) => style.getPropertyValue(name).trim());
  return diverging ? d3.piecewise(d3.interpolateRgb, ["#d55e00", empty, full]) : d3.interpolateRgb(empty, full);
}

const cells = {
  weight: [1, 1],
  legend: () => [],
  axes: () => ({x: [], y: []}),
  canBeLog: () => false,
  canCloseUp: () => false,

  draw(data, view, width) {
    const values = data.values.flat().filter(finite), form = data.forms.value;
    const [low, high] = data.limits ?? [Math.min(0, d3.min(values) ?? 0), d3.max(values) ?? 1];
    const rowHeight = clamp(420 / data.rows.length, 5, 26), longest = d3.max(data.rows, (n) => n.length);
    const marginLeft = clamp(longest * 7 + 14, 46, width * 0.3), most = Math.floor((marginLeft - 14) / 6.6);
    const columnWidth = (width - marginLeft - 10) / data.columns.length;
    const upright = d3.max(data.columns, (n) => n.length) * 7 > columnWidth;
    const drawn = data.values.flatMap((row, r) => row.map((value, c) => ({r, c, value})));
    const diverging = low < 0 && high > 0;
    const ends = diverging ? [-Math.max(-low, high), Math.max(-low, high)] : [low, high];
    const blend = colors(diverging);
    const inside = columnWidth >= 44 && rowHeight >= 15;
    const every = (size, room) => Math.max(1, Math.ceil(room / size));
    const marks = [Plot.cell(drawn, {x: "c", y: "r", fill: "value", inset: data.rows.length > 60 ? 0 : 0.5})];
    if (inside) {
      const ink = (d) => (d3.lab(blend((d.value - ends[0]) / (ends[1] - ends[0]))).l > 58 ? "black" : "white");
      const text = {x: "c", y: "r", text: (d) => written(d.value, form), fontSize: 10};
      for (const [fill, of] of d3.group(drawn.filter((d) => finite(d.value)), ink)) marks.push(Plot.text(of, {...text, fill}));
    }
    const rowEvery = every(rowHeight, 13), columnEvery = every(columnWidth, 15);
    const marginBottom = upright ? clamp(d3.max(data.columns, (n) => n.length) * 7 + 34, 50, 150) : 42;
    const svg = Plot.plot({
      className: "plot", width, height: rowHeight * data.rows.length + marginBottom + 12, marks,
      marginLeft, marginBottom, marginRight: 10, marginTop: 12,
      x: {
        type: "band", domain: d3.range(data.columns.length), label: data.axes[1], labelAnchor: "center", labelArrow: "none", tickSize: 0,
        ticks: d3.range(0, data.columns.length, columnEvery), tickFormat: (i) => shortened(data.columns[i], 18), tickRotate: upright ? -90 : 0,
      },
      y: {
        type: "band", domain: d3.range(data.rows.length), label: data.axes[0], labelArrow: "none", tickSize: 0,
        ticks: d3.range(0, data.rows.length, rowEvery), tickFormat: (i) => shortened(data.rows[i], most),
      },
      color: {type: "linear", domain: ends, interpolate: blend, unknown: "#999"},
    });
    const [x, y] = [svg.scale("x"), svg.scale("y")], color = svg.scale("color");
    const series = data.values.map((row, r) => row.map((value, c) => ({
      px: x.apply(c) + x.bandwidth / 2, py: y.apply(r) + y.bandwidth / 2, title: `${data.axes[0]} ${data.rows[r]}`,
      rows: [[data.axes[1], data.columns[c]], [data.label, written(value, form)]],
    })));
    const ramp = inside ? [] : d3.ticks(...ends, 5).map((value) => ({color: color.apply(value), text: written(value, form)}));
    return {svg, series, ramp};
  },
};

const kinds = {lines, bars, dots, cells};
