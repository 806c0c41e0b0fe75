"use strict";

// Every figure with data gets what its kind draws, controls, a legend whose entries hide lines, and
// a cursor that shows the values of a point: under the pointer, or moved by the arrow keys.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A line as it looks in the chart, for the legend. */
function swatch(look) {
  const svg = d3.create("svg").attr("width", 28).attr("height", 12).attr("aria-hidden", "true");
  svg.append("path").attr("d", "M0 6H28").attr("stroke", look.color).attr("stroke-width", 2.5).attr("stroke-dasharray", look.dash || null);
  const symbol = d3.symbol(Plot_symbols[look.symbol], 34)();
  svg.append("path").attr("d", symbol).attr("transform", "translate(14,6)").attr("fill", look.color);
  return svg.node();
}

const Plot_symbols = {
  circle: d3.symbolCircle, square: d3.symbolSquare, triangle: d3.symbolTriangle, diamond: d3.symbolDiamond,
  wye: d3.symbolWye, cross: d3.symbolCross, star: d3.symbolStar,
  hexagon: {draw: (context, size) => drawHexagon(context, Math.sqrt(size / 2.6))},
};

function drawHexagon(context, r) {
  d3.range(6).forEach((k) => {
    const [x, y] = [r * Math.sin((k * Math.PI) / 3), r * Math.cos((k * Math.PI) / 3)];
    if (k === 0) context.moveTo(x, y); else context.lineTo(x, y);
  });
  context.closePath();
}

function mount(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const kind = kinds[data.kind], axes = kind.axes(data), log = new Set(Array.isArray(data.log) ? data.log : []);
  const view = {x: axes.x[0], y: axes.y[0], log: {x: data.log === true, y: false}, close: false, hidden: new Set()};
  const tools = element("div", {class: "tools"}), legend = element("ul", {class: "legend"});
  const help = "Arrow keys go from point to point.";
  const plotted = element("div", {class: "plotted", tabindex: "0", role: "application", "aria-label": `${data.title}. ${help}`});
  const tip = element("div", {class: "tip", hidden: ""}), announced = element("div", {class: "announced", "aria-live": "polite"});
  const ramp = element("div", {class: "ramp", "aria-hidden": "true"});
  let drawn = null, cursor = null, width = 0;

  function redraw() {
    drawn?.svg.remove();
    hide();
    drawn = kind.draw(data, view, width);
    drawn.svg.setAttribute("aria-hidden", "true"); // its values are announced
    plotted.prepend(drawn.svg);
    ramp.replaceChildren(...(drawn.ramp ?? []).map(({color, text}) => {
      const box = element("i");
      box.style.background = color;
      return element("span", {}, box, text);
    }));
  }

  // -- the cursor ------------------------------------------------------------------------------------

  function hide() {
    cursor = null;
    tip.hidden = true;
    drawn && d3.select(drawn.svg).selectAll(".cursor").remove();
  }

  function show(s, i) {
    const point = drawn.series[s][i];
    hide();
    cursor = {s, i};
    const layer = d3.select(drawn.svg).append("g").attr("class", "cursor").attr("fill", "none").attr("stroke", "currentColor");
    if (drawn.hairline) layer.append("path").attr("d", `M${point.px} 20V${drawn.svg.getAttribute("height") - 40}`).attr("stroke-opacity", 0.3);
    layer.append("circle").attr("cx", point.px).attr("cy", point.py).attr("r", 6).attr("stroke-width", 1.8);
    const rows = point.rows.map(([label, value]) => element("span", {}, label ? `${label}: ${value}` : value));
    tip.replaceChildren(element("strong", {}, point.title), ...rows);
    tip.hidden = false;
    const left = point.px + 12 + tip.offsetWidth > width ? point.px - 12 - tip.offsetWidth : point.px + 12;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, point.py - tip.offsetHeight - 8)}px`;
    return point;
  }

  /** The point of a series that is nearest to a place, as [distance, index]. */
  function nearest(points, px, py) {
    const [wx, wy] = kind.weight;
    const distances = points.map((p) => Math.hypot(wx * (p.px - px), wy * (p.py - py)));
    const i = d3.minIndex(distances);
    return [i < 0 ? Infinity : distances[i], i];
  }

  function point(event) {
    const [px, py] = d3.pointer(event, drawn.svg);
    const found = drawn.series.map((points) => nearest(points, px, py));
    const s = d3.minIndex(found, ([distance]) => distance);
    if (s >= 0 && found[s][0] < Infinity) show(s, found[s][1]);
  }

  /** Left and right along a series, up and down to another. */
  function move(key) {
    const filled = d3.range(drawn.series.length).filter((s) => drawn.series[s].length > 0);
    if (filled.length === 0) return null;
    if (cursor === null) return [filled[0], 0];
    const {s, i} = cursor, here = drawn.series[s], last = here.length - 1;
    const along = {ArrowRight: Math.min(i + 1, last), ArrowLeft: Math.max(i - 1, 0), Home: 0, End: last};
    if (key in along) return [s, along[key]];
    const step = key === "ArrowDown" ? 1 : -1, other = filled[(filled.indexOf(s) + step + filled.length) % filled.length];
    return [other, nearest(drawn.series[other], here[i].px, here[i].py)[1]];
  }

  plotted.addEventListener("pointermove", point);
  plotted.addEventListener("pointerdown", point);
  plotted.addEventListener("pointerleave", hide);
  plotted.addEventListener("blur", hide);
  plotted.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return undefined;
    event.preventDefault();
    const place = move(event.key);
    if (place === null) return undefined;
    const {title, rows} = show(...place);
    announced.textContent = [title, ...rows.map(([label, value]) => (label ? `${label} ${value}` : value))].join(", ");
    return undefined;
  });

  // -- controls and legend ---------------------------------------------------------------------------

  function choice(which, label) {
    const select = element("select", {}, ...axes[which].map((key) => element("option", {value: key}, data.labels[key])));
    select.addEventListener("change", () => {
      view[which] = select.value;
      update();
    });
    if (axes[which].length > 1) tools.append(element("label", {}, label, select));
  }

  function check(label, possible, get, set) {
    const box = element("input", {type: "checkbox"}), whole = element("label", {}, box, label);
    box.addEventListener("change", () => {
      set(box.checked);
      redraw();
    });
    tools.append(whole);
    return () => {
      whole.hidden = !possible();
      if (whole.hidden) set(false);
      box.checked = get();
    };
  }

  choice("y", "show ");
  choice("x", "against ");
  const checks = ["x", "y"].map((which) => check(
    `log ${which}`, () => kind.canBeLog(data, view, which), () => view.log[which], (on) => { view.log[which] = on; },
  ));
  checks.push(check("close up", () => kind.canCloseUp(data, view), () => view.close, (on) => { view.close = on; }));

  function update() {
    if (axes.x.length > 0) view.log = {x: log.has(view.x), y: log.has(view.y)};
    checks.forEach((refresh) => refresh());
    if (width > 0) redraw();
  }

  kind.legend(data).forEach((line, i) => {
    const button = element("button", {type: "button", "aria-pressed": "true"}, swatch(data.looks[line.name]), nameOf(line));
    button.addEventListener("click", () => {
      const hidden = view.hidden.delete(i) ? false : Boolean(view.hidden.add(i));
      button.setAttribute("aria-pressed", String(!hidden));
      redraw();
    });
    legend.append(element("li", {}, button));
  });

  update();
  plotted.append(tip);
  figure.querySelector(".static").before(tools, plotted, announced, ramp, legend);
  figure.classList.add("live");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    const room = Math.floor(plotted.clientWidth);
    if (room === width || room === 0) return;
    width = room;
    redraw();
  }).observe(plotted);
}

document.querySelectorAll("figure.chart").forEach((figure) => {
  try {
    mount(figure);
  } catch (error) {
    figure.classList.remove("live"); // the static picture stays
    console.error(error);
  }
});
