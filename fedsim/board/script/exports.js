// What is shown as files: rows as CSV and JSON, the matrix as LaTeX, charts as SVG.
function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

const chosenRows = () => table.rows({ search: "applied", order: "applied" }).data().toArray();

function record(row) {
  const view = data.views[row.view];
  const flat = {
    setting: settingTitle(view.setting), valid: !data.comparisons[view.comparison].mark, threat_model: text(view.threat), vantage: view.vantage,
    batch_size: view.batch, round: view.round, defense: text(row.defense), stack: text(row.stack), attack: text(row.attack),
    n: row.n, n_ok: row.ok, independent: row.independent,
  };
  for (const { name } of data.metrics) {
    data.metric_fields.forEach((field, i) => { flat[`${name}_${field}`] = row.metrics[name]?.[i] ?? null; });
    flat[`${name}_state`] = row.metrics[name] ? row.state[name] ?? "ranked" : null;
  }
  const [accuracy, low, high] = row.accuracy;
  return { ...flat, test_accuracy: accuracy, test_accuracy_low: low, test_accuracy_high: high, epsilon: row.epsilon,
    claim: text(row.claim), audited_epsilon: row.audited, seconds: row.seconds, warning: text(row.warning),
    failures: text(row.failures) };
}

// A spreadsheet would run a text that begins like a formula.
function csvField(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const inert = /^[=+\-@\t\r\n＝＋－＠]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
}

function exportCsv() {
  const records = chosenRows().map(record);
  const fields = Object.keys(records[0] ?? { setting: "" });
  const lines = [fields, ...records.map((entry) => fields.map((field) => entry[field]))];
  save("leaderboard.csv", "text/csv", lines.map((line) => line.map(csvField).join(",")).join("\n") + "\n");
}

function exportJson() {
  const view = currentView();
  const invalid = data.rows.filter((row) => !isValid(data.views[row.view])).map(record);
  save("leaderboard.json", "application/json", JSON.stringify({
    view: view && describeView(view), rows: chosenRows().map(record), invalid_rows: invalid,
  }, null, 2) + "\n");
}

const LATEX = {
  "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", $: "\\$", "&": "\\&", "#": "\\#", "%": "\\%", _: "\\_",
  "^": "\\textasciicircum{}", "~": "\\textasciitilde{}", "−": "$-$", "–": "--", "ε": "$\\varepsilon$", "∞": "$\\infty$",
  "→": "$\\to$", "±": "$\\pm$", "×": "$\\times$", "≤": "$\\le$", "≥": "$\\ge$",
};
const latex = (value) => String(value).replace(/\s+/g, " ").replace(/[\\{}$&#%_^~−–ε∞→±×≤≥]/g, (sign) => LATEX[sign]);

function exportLatex() {
  const view = currentView();
  const name = state.metric;
  const metric = metricNamed(name);
  const { defenses, attacks, first } = matrixOrder(view, name);
  const rows = view.rows.map((i) => data.rows[i]);
  const line = (cells) => `${cells.join(" & ")} \\\\`;
  const body = defenses.map((defense) => line([latex(text(defense)), ...attacks.map((attack) => {
    const row = rows.find((one) => one.defense === defense && one.attack === attack && one.metrics[name]);
    if (!row) return "--";
    const figures = figuresOf(row, name);
    const shown = latex(aboveGuess(figures, metric, figures.excess_low, figures.excess_high) ?? number(figures.mean, metric));
    const value = `${shown} ($n=${row.ok}/${row.n}$)`;
    return isValid(view) && first.has(row.index) ? `\\textbf{${value}}` : value;
  }), latex(text(rows.find((row) => row.defense === defense).claim))]));
  save("leaderboard.tex", "application/x-tex", [
    "% needs \\usepackage{booktabs}",
    "\\begin{table}", "\\centering",
    `\\caption{${isValid(view) ? "" : `${data.comparisons[view.comparison].mark}, not ranked. `}${latex(describeView(view))}; above the guess}`,
    `\\begin{tabular}{l${"r".repeat(attacks.length)}r}`, "\\toprule",
    line(["defense", ...attacks.map((attack) => latex(text(attack))), "$\\varepsilon$ ($\\delta$, unit, neighbours)"]), "\\midrule",
    ...body, "\\bottomrule", "\\end{tabular}", "\\end{table}", "",
  ].join("\n"));
}

function exportSvg(id) {
  const drawn = byId(id).querySelector("svg");
  const copy = drawn.cloneNode(true);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  save(`${id}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(copy));
}
