// Sorting, filtering, the theme and, on a served page, newer figures. All content is there without it.
(() => {
"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

const figure = (cell) => {
  const stated = cell.dataset.sort ?? cell.textContent.replace("−", "-").replace("∞", "inf");
  const number = stated === "inf" ? Infinity : parseFloat(stated);
  return Number.isNaN(number) ? null : number;
};

function sort(table, column, falling) {
  const rows = all("tbody tr", table);
  const key = new Map(rows.map((row) => [row, row.cells[column]]));
  rows.sort((a, b) => {
    const [x, y] = [figure(key.get(a)), figure(key.get(b))];
    const order = x === null || y === null ? (y === null) - (x === null) ||
      key.get(a).textContent.localeCompare(key.get(b).textContent) : x < y ? -1 : x > y ? 1 : 0;
    return x === null && y !== null || y === null && x !== null ? -order : falling ? -order : order;
  });
  table.tBodies[0].append(...rows);
  all("thead th", table).forEach((head, at) => {
    head.ariaSort = at === column ? (falling ? "descending" : "ascending") : null;
  });
}

function enhance() {
  for (const table of all("table.rows")) {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", className: "sort", textContent: "↕", ariaLabel: `Sort by ${head.textContent}` });
      button.addEventListener("click", () => sort(table, column, head.ariaSort !== "descending"));
      head.append(" ", button);
    });
    const search = document.createElement("input");
    Object.assign(search, { type: "search", placeholder: "defense, attack", ariaLabel: "Show only rows that contain" });
    search.addEventListener("input", () => {
      const wanted = search.value.toLowerCase();
      for (const row of all("tbody tr", table)) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.parentElement.before(search);
  }
}

function choose(theme) {
  document.documentElement.style.colorScheme = theme;
  try { localStorage.setItem("fedsim-theme", theme); } catch { /* a page without storage */ }
}

function openAddress() {
  const named = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named && named.popover !== null && named.popover !== undefined) named.showPopover();
}

function follow() {
  const [mark, pause] = ["live", "pause"].map((id) => document.getElementById(id));
  let version = null;
  const ask = async () => {
    if (!pause.checked && !document.hidden && !document.querySelector(":popover-open")) {
      let message = "live";
      try {
        const answer = await fetch(location.pathname, { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
        if (answer.status === 200) {
          const opened = new Set(all("details[open]").map((part) => part.id));
          const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
          version = answer.headers.get("ETag");
          document.querySelector("main").replaceWith(newer.querySelector("main"));
          document.title = newer.title;
          for (const part of all("details")) part.open = opened.has(part.id);
          enhance();
        } else if (answer.status !== 304) message = `the server answers ${answer.status}`;
      } catch {
        message = "the server does not answer";
      }
      if (mark.textContent !== message) mark.textContent = message;
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
}

document.querySelector(".tools").hidden = false;
const theme = document.getElementById("theme");
try { theme.value = localStorage.getItem("fedsim-theme") ?? theme.value; } catch { /* likewise */ }
if (theme.value !== theme.options[0].value) choose(theme.value);
theme.addEventListener("change", () => choose(theme.value));
addEventListener("hashchange", openAddress);
enhance();
openAddress();
if ("live" in document.body.dataset) follow();
})();
