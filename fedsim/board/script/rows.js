// All rows: sorted, filtered and searched by DataTables. Sorting stays within a view, so that rows
// of two views are in no common ranking.
let table = null;

const viewLabel = (view) =>
  `${settingTitle(view.setting)}; ${text(view.threat)}; ${view.vantage}; batch ${view.batch}; round ${view.round}`;

const epsilonValue = (value) => (value === "inf" ? Number.MAX_VALUE : isNumber(value) ? value : null);

function metricColumn(title, field, show) {
  return { title, field, number: true,
    value: (row) => figuresOf(row, state.metric)?.[field] ?? null,
    show: (row) => {
      const figures = figuresOf(row, state.metric);
      return figures ? show(figures, metricNamed(state.metric)) : "–";
    } };
}

const COLUMNS = [
  { title: "view", field: "view", value: (row) => row.view, show: (row) => viewLabel(data.views[row.view]), searched: true },
  { title: "defense", field: "defense", value: (row) => text(row.defense), searched: true },
  { title: "attack", field: "attack", value: (row) => text(row.attack), searched: true },
  metricColumn("above the guess", "excess", (f, m) => aboveGuess(f, m, f.excess_low, f.excess_high) ?? "–"),
  metricColumn("value", "mean", (f, m) => `${number(f.mean, m)}${interval(f.low, f.high, m)}`),
  metricColumn("guess", "guess", (f, m) => number(f.guess, m)),
  metricColumn("worst", "worst", (f, m) => number(f.worst, m)),
  { title: "n", field: "n", number: true, value: (row) => row.n, show: (row) => `${row.ok}/${row.n}` },
  { title: "accuracy", field: "accuracy", number: true, value: (row) => row.accuracy[0], show: (row) => text(row.accuracy_text) },
  { title: "claimed ε (δ, unit, neighbours)", field: "epsilon", number: true, value: (row) => epsilonValue(row.epsilon), show: (row) => text(row.claim) },
  { title: "audited ε, at least", field: "audited", number: true, value: (row) => row.audited, show: (row) => text(row.audited_text) },
  { title: "certified", field: "certified", number: true,
    value: (row) => (row.certified ? row.certified[0] / Math.max(1, row.certified[1]) : null),
    show: (row) => (row.certified
      ? `${row.certified[0]}/${row.certified[1]}${row.certified[2] ? ` (${row.certified[2]} false)` : ""}` : "–") },
  { title: "seconds", field: "seconds", number: true, value: (row) => row.seconds, show: (row) => (isNumber(row.seconds) ? row.seconds.toFixed(1) : "–") },
  { title: "note", field: "note", value: (row) => note(row), searched: true },
];

function note(row) {
  const found = STATES[row.state[state.metric]];
  return [found, text(row.warning)].filter(Boolean).join(" | ");
}

// DataTables sets a cell's HTML: what is displayed is escaped here.
function asColumn(column) {
  const show = column.show ?? column.value;
  return {
    title: escaped(column.title), data: null, type: column.number ? "num" : "string",
    className: column.number ? "number" : column.field, orderSequence: column.number ? ["desc", "asc"] : ["asc", "desc"],
    searchable: Boolean(column.searched),
    render: (_, type, row) => {
      if (type === "display") return escaped(show(row));
      if (type === "filter") return column.searched ? show(row) : "";
      return column.value(row) ?? (column.number ? -Number.MAX_VALUE : "");
    },
  };
}

const sorting = () => {
  const [field, direction] = state.sort.split(":");
  const index = COLUMNS.findIndex((column) => column.field === field);
  return index > 0 ? [[index, direction === "asc" ? "asc" : "desc"]] : [[3, "desc"]];
};

function makeTable() {
  table = new DataTable("#rows", {
    data: [], columns: COLUMNS.map(asColumn), pageLength: 25, deferRender: true, autoWidth: false,
    order: sorting(), orderFixed: { pre: [[0, "asc"]] }, orderMulti: false,
    layout: { topStart: null, topEnd: null, bottomStart: "info", bottomEnd: "paging" },
    language: { emptyTable: "No row.", zeroRecords: "No row fits.", info: "_START_ to _END_ of _TOTAL_ rows",
      infoEmpty: "No row", infoFiltered: "(of _MAX_)" },
    columnDefs: [{ targets: 0, orderable: false }],
  });
  table.search.fixed("chosen", (_, row) =>
    (!state.defense || text(row.defense) === state.defense) &&
    (!state.attack || text(row.attack) === state.attack));
  table.on("order", () => {
    const [first] = table.order().filter(([index]) => index > 0);
    if (!first || drawing) return;
    state.sort = first[0] === 3 && first[1] === "desc" ? "" : `${COLUMNS[first[0]].field}:${first[1]}`;
    writeAddress();
  });
}

let drawing = false;
let chosenView = null;
let contents = ""; // what the table holds: remade only if that changes
let contentsOf = null;

// The table holds the rows of all views only while they are asked for, so that a switch is quick.
function drawRows(view) {
  drawing = true;
  chosenView = view ? data.views.indexOf(view) : null;
  const isAll = state.scope === "all";
  const wanted = `${isAll ? "all" : chosenView} ${state.metric}`;
  if (contentsOf !== data) {
    choices("defense", "every defense");
    choices("attack", "every attack");
  }
  if (contentsOf !== data || contents !== wanted) {
    const rows = isAll ? data.rows : view ? view.rows.map((index) => data.rows[index]) : [];
    table.clear().rows.add(rows.filter((row) => isValid(data.views[row.view])));
    [contents, contentsOf] = [wanted, data];
  }
  for (const key of ["search", "scope", "defense", "attack"]) byId(key).value = state[key];
  if (table.column(0).visible() !== isAll) table.column(0).visible(isAll, false);
  const metric = metricNamed(state.metric);
  byId("rows-note").textContent = `Figures are of ${metric ? metric.heading : "no metric"}. ` +
    "Rows of one view stand together, and sorting stays within a view: no two views share a ranking.";
  table.order(sorting()).search(state.search).draw();
  drawing = false;
}

function filterRows() {
  drawing = true;
  table.search(state.search).draw();
  drawing = false;
}

function choices(key, every) {
  const place = byId(key);
  const names = [...new Set([...new Set(data.rows.map((row) => row[key]))].map(text))].sort();
  if (state[key] && !names.includes(state[key])) state[key] = ""; // no such name is there
  place.replaceChildren(element("option", { value: "" }, every),
    ...names.map((name) => element("option", { value: name }, name)));
}

// Rows of comparisons from which nothing follows, and runs without a score.
function drawApart() {
  const place = byId("apart");
  const parts = [];
  data.comparisons.forEach((comparison, index) => {
    if (comparison.valid) return;
    const rows = data.rows.filter((row) => data.views[row.view].comparison === index);
    const shown = rows.slice(0, APART);
    parts.push(element("details", { class: "apart" },
      element("summary", {}, element("span", { class: "pill bad" }, comparison.mark), ` ${comparison.title} (${counted(rows.length, "row")})`),
      element("p", { class: "small" }, comparison.control),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${comparison.mark}: ${comparison.title}` },
        element("table", { class: "data" },
          element("thead", {}, element("tr", {}, ...["defense", "attack", "B", "round", "metric", "value", "above the guess", "n"]
            .map((head) => element("th", { scope: "col" }, head)))),
          element("tbody", {}, ...shown.map(apartRow)))),
      rows.length > APART ? element("p", { class: "small muted" }, `${counted(rows.length - APART, "more row")}; JSON has all.`) : null));
  });
  byId("apart-section").hidden = !parts.length;
  place.replaceChildren(...parts);
}

const APART = 200;

function apartRow(row) {
  const view = data.views[row.view];
  const name = row.metrics.psnr ? "psnr" : Object.keys(row.metrics)[0];
  const metric = name && metricNamed(name);
  const figures = name && figuresOf(row, name);
  return element("tr", {}, ...[text(row.defense), text(row.attack), view.batch, view.round,
    metric ? metric.heading : "–", metric ? number(figures.mean, metric) : "–",
    (metric && aboveGuess(figures, metric, figures.excess_low, figures.excess_high)) ?? "–", `${row.ok}/${row.n}`]
    .map((value) => element("td", {}, String(value))));
}
