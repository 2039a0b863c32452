"use strict";
(() => {
  // Charts. What could not be drawn says why in its place.
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const options = {
    renderer: "svg", actions: false, ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true },
  };
  const draw = async ([key, chart]) => {
    const box = document.getElementById(key);
    try {
      await vegaEmbed(box, chart, options);
      return true;
    } catch (error) {
      box.textContent = `This chart could not be drawn: ${error.message}`;
      box.classList.add("missing");
      return false;
    }
  };
  Promise.all(Object.entries(charts).map(draw)).then((drawn) => {
    document.documentElement.dataset.charts = drawn.every(Boolean) ? "drawn" : "failed";
  });

  // Tables sort by a column: upwards, downwards, as they came. Cells without a value stay last.
  const compare = (column, sign) => (one, other) => {
    const [a, b] = [one, other].map((row) => row.cells[column].dataset.value);
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    const difference = Number(a) - Number(b);
    return sign * (Number.isNaN(difference) ? a.localeCompare(b) : difference);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const asked = [...body.rows];
    for (const head of table.tHead.rows[0].cells) {
      head.querySelector("button")?.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort") ?? "none"];
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        if (next !== "none") head.setAttribute("aria-sort", next);
        const sign = next === "descending" ? -1 : 1;
        body.append(...(next === "none" ? asked : [...asked].sort(compare(head.cellIndex, sign))));
      });
    }
  }

  // On paper nothing can be opened, so everything is open.
  const closed = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...closed()];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
