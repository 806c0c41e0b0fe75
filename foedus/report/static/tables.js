"use strict";

// Buttons that sort tables and copy code. Without JavaScript, both are plain text.

/** The number that a cell begins with; NaN where it is text. */
function numberIn(text) {
  return /^[-+−]?[\d.,]+/.test(text) ? parseFloat(text.replace(/,/g, "").replace("−", "-")) : NaN;
}

function sortBy(table, column, descending) {
  const body = table.tBodies[0], text = (row) => row.cells[column].textContent.trim();
  const rows = [...body.rows], direction = descending ? -1 : 1;
  const compare = (a, b) => {
    const [x, y] = [numberIn(text(a)), numberIn(text(b))];
    if (Number.isNaN(x) && Number.isNaN(y)) return direction * text(a).localeCompare(text(b));
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1; // dashes stay last
    return direction * (x - y);
  };
  body.append(...rows.sort(compare));
}

document.querySelectorAll("table").forEach((table) => {
  if (table.tHead === null || table.tBodies[0].rows.length < 2) return;
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const values = [...table.tBodies[0].rows].map((row) => numberIn(row.cells[column].textContent.trim()));
      const before = heading.getAttribute("aria-sort"), numbers = values.some((v) => !Number.isNaN(v));
      const descending = before === null ? numbers : before === "ascending"; // numbers: the largest first
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    });
  });
});

document.querySelectorAll("pre.copy").forEach((pre) => {
  const box = document.createElement("div"), button = document.createElement("button");
  box.className = "copied";
  button.type = "button";
  button.textContent = "Copy";
  pre.replaceWith(box);
  box.append(pre, button);
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(pre); // what Ctrl-C copies where the clipboard is not allowed
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Press Ctrl-C";
    }
  });
});
