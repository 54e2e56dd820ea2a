// Joins the parts: reads the data, draws what is chosen, and follows runs that go on.
function load(document_) {
  data = document_;
  data.rows.forEach((row, index) => { row.index = index; });
}

const LABELS = {
  setting: (value) => {
    const setting = data.settings[value];
    const valid = data.views.some((view) => view.setting === Number(value) && isValid(view));
    const scored = data.views.some((view) => view.setting === Number(value));
    const mark = scored ? (valid ? "" : `${markOf(Number(value))} · `) : setting.mark ? `${setting.mark} · ` : setting.attacked ? "" : "not attacked · ";
    return mark + setting.title;
  },
  metric: (value) => metricNamed(value).heading,
};

// Why none of a setting's tables is ranked.
function markOf(setting) {
  return data.comparisons[data.views.find((view) => view.setting === setting).comparison].mark;
}

function drawControls() {
  for (const key of KEYS) {
    const select = byId(key);
    const label = LABELS[key] ?? ((value) => value);
    select.replaceChildren(...optionsOf(key).map((value) => element("option", { value }, label(value))));
    select.value = state[key] ?? "";
    select.disabled = select.options.length < 2;
  }
  byId("theme").value = state.theme;
}

function banner(mark, message, kind = "") {
  return element("p", { class: `banner ${kind}` }, element("strong", {}, mark), ` ${message}`);
}

function drawStatus(view) {
  const counts = [counted(data.rows.length, "row"), counted(data.views.length, "view"), counted(data.settings.length, "setting")];
  byId("counts").textContent = counts.join(", ");
  byId("notes").replaceChildren(...data.notes.map((line) => {
    const [mark, ...rest] = line.split(":");
    return banner(mark, rest.join(":").trim(), "waiting");
  }));
  const place = byId("validity");
  place.replaceChildren();
  byId("attacker").textContent = "";
  if (!view) {
    const setting = data.settings[state.setting];
    byId("status").textContent = !setting ? "No run yet."
      : setting.attacked ? "No attack of this setting is scored yet." : "Nothing is attacked in this setting.";
    return;
  }
  const comparison = data.comparisons[view.comparison];
  const granted = text(view.granted);
  byId("attacker").textContent = `The attacker sees ${text(view.sees)}. ${granted ? `It is granted ${granted}.` : ""}`;
  byId("status").textContent = `${counted(view.rows.length, "row")} in this view. ` +
    (comparison.valid ? `Positive control passed${comparison.mark ? " so far" : ""}: ${comparison.control}.`
      : `${comparison.mark}: nothing is ranked.`);
  if (!comparison.valid) place.append(banner(comparison.mark, comparison.control));
  if (comparison.warnings.length) {
    place.append(element("details", {}, element("summary", {}, counted(comparison.warnings.length, "warning")),
      element("ul", { class: "small" }, ...comparison.warnings.map((line) => element("li", {}, line)))));
  }
}

function drawTerms() {
  byId("terms").replaceChildren(...data.terms.flatMap(([name, meaning]) =>
    [element("dt", {}, name), element("dd", {}, meaning)]));
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const dark = state.theme === "dark" || (state.theme === "auto" && systemDark.matches);
  document.documentElement.dataset.shade = dark ? "dark" : "light";
  if (state.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
}

function drawCharts() {
  drawUtility(currentView());
  drawClaims();
}

function draw() {
  settle();
  applyTheme();
  const view = currentView();
  drawControls();
  drawStatus(view);
  drawWorst(view);
  drawMatrix(view);
  drawCharts();
  drawRows(view);
  drawApart();
  writeAddress();
}

function goTo(view) {
  for (const key of Object.keys(VALUES)) state[key] = VALUES[key](view);
  draw();
  byId("worst-title").focus();
}

function listen() {
  for (const key of KEYS) {
    byId(key).addEventListener("change", (event) => { state[key] = event.target.value; draw(); });
  }
  for (const [key, kind] of [["defense", "change"], ["attack", "change"], ["search", "input"]]) {
    byId(key).addEventListener(kind, (event) => {
      state[key] = event.target.value;
      filterRows();
      writeAddress();
    });
  }
  byId("scope").addEventListener("change", (event) => {
    state.scope = event.target.value;
    drawRows(currentView());
    writeAddress();
  });
  for (const id of ["view", "filters"]) byId(id).addEventListener("submit", (event) => event.preventDefault());
  byId("theme").addEventListener("change", (event) => {
    state.theme = event.target.value;
    applyTheme();
    drawCharts();
    writeAddress();
  });
  systemDark.addEventListener("change", () => { applyTheme(); drawCharts(); });
  byId("export-csv").addEventListener("click", exportCsv);
  byId("export-json").addEventListener("click", exportJson);
  byId("export-latex").addEventListener("click", exportLatex);
  byId("export-utility").addEventListener("click", () => exportSvg("utility"));
  byId("export-claims").addEventListener("click", () => exportSvg("claims"));
  addEventListener("hashchange", () => { readAddress(); draw(); });
  let waiting = null;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawCharts, 150);
  });
}

// Takes newer data and keeps what is chosen: settings may have other numbers there.
function reload(newer) {
  const title = data.settings[state.setting]?.title;
  load(newer);
  const found = data.settings.findIndex((setting) => setting.title === title);
  state.setting = found < 0 ? undefined : String(found);
  draw();
}

// Asks the server every two seconds whether the runs have changed.
function follow() {
  const mark = byId("live");
  const pause = byId("pause");
  let version = null;
  let paused = false;
  const say = (message, lost) => {
    if (mark.textContent !== message) mark.textContent = message;
    mark.classList.toggle("lost", lost);
  };
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(paused ? "paused" : "live", false);
  });
  const ask = async () => {
    if (!paused && !document.hidden) {
      try {
        const answer = await fetch("data", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
        if (answer.status === 200) {
          const received = await answer.json();
          version = answer.headers.get("ETag");
          if (received.problem) say(received.problem, true);
          else if (byId("detail").open) version = null; // what is read must not change meanwhile
          else {
            reload(received);
            say("live", false);
          }
        } else if (answer.status === 304) say("live", false);
        else say(`the server answers ${answer.status}`, true);
      } catch {
        say("the server does not answer", true);
      }
    }
    setTimeout(ask, 2000);
  };
  ask();
}

load(JSON.parse(byId("board-data").textContent));
readAddress();
makeTable();
listen();
drawTerms();
draw();
if (document.body.dataset.live) follow();
