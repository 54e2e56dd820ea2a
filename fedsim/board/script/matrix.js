// The worst attack on each defense, the matrix of attacks and defenses, and the details of a row.
// How badly a row leaks, as a class. The report's levels are of the metric that ranks an attack; no other is tinted.
function level(row, name) {
  const isJudged = name === "psnr" || (name === "subspace_error" && !row.metrics.psnr);
  // Too few trials for an interval show nothing, least of all that nothing leaks.
  const isUnsure = row.level === "unseen" && !isNumber(figuresOf(row, name).low);
  return isJudged && !isUnsure ? LEVELS[row.level] ?? "" : "";
}

const LEVELS = { leak: "bad", features: "bad", partial: "some", undecided: "some", unseen: "good" };

const STATES = {
  blind: "no better than on another update",
  failed: "every trial failed",
};

const trials = (row) =>
  `n = ${row.ok}/${row.n}${row.independent === row.n ? "" : ` (${row.independent} independent)`}`;

function aboveGuess(figures, metric, low, high) {
  if (!isNumber(figures.excess)) return null;
  return `${signed(figures.excess, metric)}${unitOf(metric)}${interval(low, high, metric, signed)}`;
}

function image(number, description, picture) {
  return element("img", {
    src: data.pictures[number], alt: description, width: picture.width, height: picture.height,
  });
}

function pictureOf(row, description) {
  const picture = row.pictures;
  if (!picture) return null;
  if (picture.problem) return element("span", { class: "muted" }, "picture cannot be read");
  const [truth, reconstruction, psnr] = picture.pairs[0];
  return element("span", { class: "pair" },
    image(truth, `true image of ${description}`, picture),
    image(reconstruction, `reconstruction at ${psnr} dB by ${description}`, picture));
}

function cell(row, name, isFirst) {
  const metric = metricNamed(name);
  const attack = text(row.attack);
  const defense = text(row.defense);
  const figures = figuresOf(row, name);
  const state = row.state[name];
  const above = aboveGuess(figures, metric, figures.excess_low, figures.excess_high);
  return element("button", {
    type: "button", class: `cell ${level(row, name)}${isFirst ? " first" : ""}`,
    "data-row": row.index, "aria-haspopup": "dialog",
    on: { click: () => showDetail(row) },
  },
    pictureOf(row, `${attack} on ${defense}`),
    element("strong", {}, above ?? `${number(figures.mean, metric)}${unitOf(metric)}`),
    element("span", {}, above ? "above the guess" : "no guess to compare with"),
    element("span", {},
      `${metric.heading} ${number(figures.mean, metric)}${interval(figures.low, figures.high, metric)}`),
    element("span", {}, trials(row)),
    state ? element("span", {}, STATES[state]) : null,
    row.exposed && state !== "failed" && name === "psnr"
      ? element("span", {}, `at least one trial gains ${data.exposed_gain} dB or more`) : null,
    isFirst ? element("span", {}, "▸ worst on this defense") : null);
}

function drawMatrix(view) {
  const name = state.metric;
  const metric = metricNamed(name);
  const place = byId("matrix");
  place.replaceChildren();
  byId("matrix-note").textContent = "";
  byId("matrix-view").textContent = view && metric ? describeView(view) : "";
  byId("export-latex").hidden = !view || !metric;
  if (!view || !metric) {
    place.append(element("p", { class: "absent" }, "No attack is scored in this setting."));
    return;
  }
  const ranked = isValid(view);
  const { defenses, attacks, first } = matrixOrder(view, name);
  byId("matrix-note").textContent =
    `Each cell: the median trial’s true image and its reconstruction, then ${metric.heading} above ` +
    "the guess with its interval, the value itself, and trials that worked of all. " +
    (ranked ? "▸ marks the worst attack. " : `Not ranked: this comparison is ${data.comparisons[view.comparison].mark}. `) +
    "Choose a cell for all its figures." +
    (data.pictures_omitted
      ? ` ${counted(data.pictures_omitted, "row")} without a picture, to keep the page small.` : "");
  const head = element("tr", {}, element("th", { scope: "col" }, "defense"),
    ...attacks.map((attack) => element("th", { scope: "col" }, text(attack))));
  const body = defenses.map((defense) => {
    const rows = view.rows.map((i) => data.rows[i]).filter((row) => row.defense === defense);
    return element("tr", {},
      element("th", { scope: "row" }, text(defense),
        element("div", { class: "muted small" }, `ε ${text(rows[0].claim)}`)),
      ...attacks.map((attack) => {
        const own = rows.filter((row) => row.attack === attack && row.metrics[name]);
        return element("td", {}, ...(own.length
          ? own.map((row) => cell(row, name, ranked && first.has(row.index)))
          : [element("span", { class: "absent" }, "not measured")]));
      }));
  });
  place.append(element("table", { class: "matrix" },
    element("thead", {}, head), element("tbody", {}, ...body)));
}

// The order of rows and columns: leakiest defense first behind the undefended one.
function matrixOrder(view, name) {
  const rows = view.rows.map((i) => data.rows[i]);
  const worst = view.worst[name] ?? [];
  const leading = worst.map(([row]) => data.rows[row].defense);
  const defenses = [...new Set([...leading, ...rows.map((row) => row.defense)])];
  const attacks = [...new Set(rows.filter((row) => row.metrics[name]).map((row) => row.attack))];
  return { defenses, attacks, first: new Set(worst.filter(([, s]) => s === "ranked").map(([row]) => row)) };
}

const describeView = (view) =>
  `${settingTitle(view.setting)}; ${text(view.threat)}; seen from: ${view.vantage}; ` +
  `batch size ${view.batch}; round ${view.round}; ${metricNamed(state.metric).heading}`;

const VERDICTS = { rely: "good", "do not rely": "bad", "not shown": "some" };

function drawWorst(view) {
  const list = byId("worst");
  list.replaceChildren();
  const metric = view && metricNamed(state.metric);
  const shown = Boolean(metric) && isValid(view);
  byId("worst-section").hidden = !shown;
  if (!shown) return;
  const answers = data.comparisons[view.comparison].answers;
  byId("worst-note").textContent =
    `By ${metric.heading} above the guess, at batch size ${view.batch} and round ${view.round} alone. ` +
    "The interval allows for the choice of the worst of several attacks. What stands below it is " +
    "the answer over all batch sizes, rounds and metrics of this comparison.";
  for (const [index, attackState, compared, excess, low, high] of view.worst[state.metric]) {
    const row = data.rows[index];
    const defense = text(row.defense);
    const answer = answers[defense];
    const figures = figuresOf(row, state.metric);
    const value = aboveGuess({ excess }, metric, low, high) ??
      `${metric.heading} ${number(figures.mean, metric)}${unitOf(metric)}`;
    list.append(element("li", { "data-defense": defense },
      element("div", {}, element("h3", {}, defense),
        element("p", { class: "muted small" }, text(row.stack) || "no defense")),
      element("div", {},
        element("p", {},
          element("span", { class: "figure" }, attackState === "failed" ? "not measured" : value), " by ",
          element("strong", {}, text(row.attack)),
          `, ${trials(row)}${compared > 1 ? `, the worst of ${compared} attacks` : ""}. `,
          STATES[attackState]
            ? element("span", { class: "pill" }, STATES[attackState]) : null),
        answer ? element("p", { class: "small" },
          element("span", { class: `pill ${VERDICTS[answer.verdict]}` }, answer.verdict), " ",
          answer.brief) : null,
        answer?.grounds.length ? element("dl", { class: "grounds" }, ...answer.grounds.map(([name, words]) =>
          element("div", {}, element("dt", {}, name), element("dd", {}, words)))) : null)));
  }
  const elsewhere = missingDefenses(view);
  if (elsewhere.length) {
    list.append(element("li", {}, element("div", {}, element("h3", {}, "Not in this view")),
      element("div", {}, ...elsewhere.map(({ defense, other }) => element("p", { class: "small" },
        `${defense} (seen from: ${other.vantage}, batch size ${other.batch}, round ${other.round}) `,
        element("button", { type: "button", on: { click: () => goTo(other) } }, "Show"))))));
  }
}

// Defenses of the same comparison that this view has no row of, and a view that has.
function missingDefenses(view) {
  const here = new Set(view.rows.map((i) => data.rows[i].defense));
  const others = new Map();
  for (const other of data.views) {
    if (other.comparison !== view.comparison || other === view) continue;
    for (const i of other.rows) {
      const { defense } = data.rows[i];
      if (!here.has(defense) && !others.has(defense)) others.set(defense, other);
    }
  }
  return [...others].map(([defense, other]) => ({ defense: text(defense), other }));
}

function showDetail(row) {
  const dialog = byId("detail");
  const view = data.views[row.view];
  const name = `${text(row.attack)} on ${text(row.defense)}`;
  const facts = [
    ["view", describeView(view)],
    ["defense", text(row.stack) || "none"],
    ["trials", `${trials(row)}${row.images ? `, ${counted(row.images, "different image")}` : ""}`],
    ["accuracy", text(row.accuracy_text)],
    ["claimed ε", text(row.claim)],
    ["audited ε", isNumber(row.audited) ? `at least ${text(row.audited_text)}` : "no audit"],
    ["seconds of a trial", isNumber(row.seconds) ? row.seconds.toFixed(1) : "–"],
    ["warnings", text(row.warning)],
    ["failed trials", text(row.failures)],
    ["pictures", row.pictures?.problem ?? ""],
    ["validity", isValid(view) ? "" : `${data.comparisons[view.comparison].mark}: ${data.comparisons[view.comparison].control}`],
    ["folders", data.settings[view.setting].folders.join(", ")],
  ];
  const shown = row.pictures?.pairs ?? [];
  dialog.replaceChildren(...[
    element("button", { type: "button", class: "close", on: { click: () => dialog.close() } }, "Close"),
    element("h2", { id: "detail-title" }, name),
    element("div", { class: "pairs" }, ...shown.map(([truth, reconstruction, psnr]) =>
      element("figure", {}, element("div", { class: "pair" },
        image(truth, "true image", row.pictures), image(reconstruction, "reconstruction", row.pictures)),
      element("figcaption", {}, `truth, reconstruction: ${psnr} dB`)))),
    row.pictures?.hidden
      ? element("p", { class: "small muted" }, `${counted(row.pictures.hidden, "more image")} in the run’s folder`) : null,
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Metrics" }, metricTable(row)),
    element("dl", {}, ...facts.filter(([, value]) => value).flatMap(([term, value]) =>
      [element("dt", {}, term), element("dd", {}, value)])),
  ].filter(Boolean));
  dialog.showModal();
}

function metricTable(row) {
  const lines = data.metrics.filter((metric) => row.metrics[metric.name]).map((metric) => {
    const figures = figuresOf(row, metric.name);
    return element("tr", {}, element("th", { scope: "row", title: metric.meaning }, metric.heading),
      element("td", {}, `${number(figures.mean, metric)}${interval(figures.low, figures.high, metric)}`),
      element("td", {}, number(figures.guess, metric)),
      element("td", {}, aboveGuess(figures, metric, figures.excess_low, figures.excess_high) ?? "–"),
      element("td", {}, number(figures.worst, metric)));
  });
  const heads = ["metric", "mean and interval", "guess", "above the guess", "worst"];
  return element("table", {}, element("thead", {}, element("tr", {},
    ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...lines));
}
