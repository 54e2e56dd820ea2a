// Leakage against utility, and claimed against audited ε; drawn by Observable Plot.
function colors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: read("ink"), muted: read("muted"), leak: read("leak"), calm: read("calm"), paper: read("paper"), rule: read("rule") };
}

const letter = (index) => (index < 26 ? "" : String.fromCharCode(64 + Math.floor(index / 26))) +
  String.fromCharCode(65 + (index % 26));

const chartWidth = (place) => Math.max(280, Math.min(760, place.parentElement.clientWidth));

function plot(place, description, options) {
  const { ink, paper } = colors();
  const drawn = Plot.plot({
    width: chartWidth(place), style: { color: ink, background: paper, fontSize: "13px", fontFamily: "sans-serif" },
    ...options,
  });
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", description);
  // An image has no parts: what Plot names inside of it would be read as findings without a role.
  for (const part of drawn.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  place.replaceChildren(drawn);
}

const SHORT = 36; // a text of fewer characters stays on one line

function legend(place, heads, lines) {
  place.replaceChildren(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": heads.join(", ") },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
      element("tbody", {}, ...lines.map((line) => element("tr", {}, ...line.map((value) => element("td", { class: (value ?? "").length < SHORT ? "short" : "" }, value ?? ""))))))));
}

// Letters beside their dots, pushed apart where dots are close.
function spread(points, x, y) {
  const nodes = points.map((point) => ({ x: x(point), y: y(point) - 16, wantedX: x(point), wantedY: y(point) - 16 }));
  const dots = points.map((point) => ({ fx: x(point), fy: y(point) }));
  d3.forceSimulation([...nodes, ...dots])
    .force("x", d3.forceX((node) => node.wantedX ?? node.fx).strength(0.15))
    .force("y", d3.forceY((node) => node.wantedY ?? node.fy).strength(0.15))
    .force("apart", d3.forceCollide(9)).stop().tick(150);
  return nodes;
}

function drawUtility(view) {
  const section = byId("utility-section");
  const metric = view && metricNamed(state.metric);
  const points = metric && isValid(view) ? view.worst[state.metric].flatMap(([index, attackState, , excess, low, high]) => {
    const row = data.rows[index];
    const [accuracy, from, to] = row.accuracy;
    if (!isNumber(accuracy) || !isNumber(excess) || attackState === "failed") return [];
    return [{ row, excess, low: low ?? excess, high: high ?? excess, blind: attackState === "blind",
      accuracy: 100 * accuracy, from: 100 * (from ?? accuracy), to: 100 * (to ?? accuracy) }];
  }) : [];
  section.hidden = !points.length;
  if (!points.length) return;
  points.forEach((point, index) => { point.letter = letter(index); });
  byId("utility-note").textContent =
    `Across: test accuracy. Up: ${metric.heading} above the guess by the worst attack of this view. Right and ` +
    "low is better. Bars are intervals. A hollow dot is an attack that does no better than on another update.";
  const { ink, muted, leak, rule, paper } = colors();
  const place = byId("utility");
  const names = points.map((p) => `${text(p.row.defense)} ${signed(p.excess, metric)}${unitOf(metric)} at ${p.accuracy.toFixed(1)}%`);
  const height = 400;
  const marks = [
    Plot.gridY({ stroke: rule, strokeOpacity: 1 }),
    Plot.ruleY([0], { stroke: muted, strokeDasharray: "4 3" }),
    Plot.ruleX(points, { x: "accuracy", y1: "low", y2: "high", stroke: muted }),
    Plot.ruleY(points, { y: "excess", x1: "from", x2: "to", stroke: muted }),
    Plot.dot(points, { x: "accuracy", y: "excess", r: 5, stroke: (p) => (p.row.undefended ? ink : leak),
      fill: (p) => (p.blind ? paper : p.row.undefended ? ink : leak) }),
  ];
  const unit = unitOf(metric).trim();
  const options = {
    height, marginLeft: 52, marginBottom: 50, marginRight: 24, marginTop: 30,
    x: { label: "test accuracy, %", nice: true, labelAnchor: "center", labelArrow: "none", labelOffset: 38, ticks: 6 },
    y: { label: `${metric.heading.replace(" dB", "")} above the guess${unit ? `, ${unit}` : ""}`, nice: true, grid: false, labelArrow: "none" },
  };
  const scales = Plot.plot({ width: chartWidth(place), ...options, marks });
  const [x, y] = [scales.scale("x"), scales.scale("y")];
  const spots = spread(points, (p) => x.apply(p.accuracy), (p) => y.apply(p.excess));
  const letters = points.map((p, i) => ({ letter: p.letter, accuracy: x.invert(spots[i].x), excess: y.invert(spots[i].y) }));
  plot(place, `Leakage against utility: ${names.join("; ")}`, {
    ...options, x: { ...options.x, domain: x.domain }, y: { ...options.y, domain: y.domain },
    marks: [...marks, Plot.text(letters, { x: "accuracy", y: "excess", text: "letter", fontWeight: 650, fill: ink, stroke: paper, strokeWidth: 3 })],
  });
  legend(byId("utility-legend"), ["", "defense", "worst attack", "above the guess", "accuracy", "ε (δ, unit, neighbours)"],
    points.map((p) => [p.letter, text(p.row.defense), text(p.row.attack),
      aboveGuess({ excess: p.excess }, metric, p.low === p.excess ? null : p.low, p.high), text(p.row.accuracy_text), text(p.row.claim)]));
}

function drawClaims() {
  const setting = data.settings[state.setting];
  const claims = setting ? setting.claims.filter((c) => c.epsilon !== null || c.audited !== null) : [];
  const section = byId("claims-section");
  section.hidden = !claims.length;
  if (!claims.length) return;
  const refuted = (c) => isNumber(c.epsilon) && isNumber(c.audited) && c.audited > c.epsilon;
  const drawn = claims.filter((c) => isNumber(c.epsilon) || isNumber(c.audited));
  byId("claims-note").textContent = drawn.length
    ? "Ring: ε that is claimed for the whole run. Dot: ε that an audit found to be spent at least. A dot right of its " +
      "ring refutes the claim. ∞: nothing is claimed. Claims of different units or neighbours do not compare."
    : "No defense of this setting claims a finite ε, and none was audited.";
  byId("export-claims").hidden = !drawn.length;
  const place = byId("claims");
  if (drawn.length) {
    const { ink, muted, leak, calm, paper, rule } = colors();
    const top = d3.max(drawn, (c) => Math.max(isNumber(c.epsilon) ? c.epsilon : 0, c.audited ?? 0)) || 1;
    const narrow = chartWidth(place) < 500;
    const name = (c) => (c.defense.length > 18 ? `${c.defense.slice(0, 17)}…` : c.defense);
    const named = drawn.map((c, i) => ({ ...c, key: `${i}` }));
    plot(place, `Claimed and audited ε: ${drawn.map((c) =>
      `${c.defense} claimed ${c.claim}, audited ${c.audited_text}`).join("; ")}`, {
      height: 70 + 34 * named.length, marginLeft: narrow ? 100 : 150, marginRight: 40, marginBottom: 50,
      x: { label: "ε", domain: [0, top * 1.08], type: top > 20 ? "sqrt" : "linear", labelAnchor: "center", labelArrow: "none", labelOffset: 38, ticks: narrow ? 4 : 7 },
      y: { domain: named.map((c) => c.key), type: "point", label: null, tickFormat: (key) => name(named[key]), padding: 0.6 },
      marks: [
        Plot.gridX({ stroke: rule, strokeOpacity: 1 }),
        Plot.link(named.filter((c) => isNumber(c.epsilon) && isNumber(c.audited)),
          { x1: "audited", x2: "epsilon", y1: "key", y2: "key", stroke: (c) => (refuted(c) ? leak : muted), strokeWidth: 2 }),
        Plot.dot(named.filter((c) => isNumber(c.epsilon)), { x: "epsilon", y: "key", r: 6, stroke: ink, strokeWidth: 2, fill: paper }),
        Plot.dot(named.filter((c) => isNumber(c.audited)), { x: "audited", y: "key", r: 4.5, fill: (c) => (refuted(c) ? leak : calm) }),
        Plot.text(named.filter((c) => c.epsilon === "inf"), { y: "key", text: () => "∞", frameAnchor: "right", dx: 18, fontSize: 17, fill: ink }),
      ],
    });
  } else place.replaceChildren();
  legend(byId("claims-legend"), ["defense", "claimed ε (δ, unit, neighbours)", "audited ε, at least", ""],
    claims.map((c) => [c.defense, c.claim, c.audited_text,
      refuted(c) ? "refuted by the audit" : isNumber(c.audited) ? "not refuted" : "not audited"]));
}
