// What is chosen, and the same in the address behind `#`, so that a link shows the same view.
const KEYS = ["setting", "threat", "vantage", "batch", "round", "metric"];
const DEFAULTS = { search: "", defense: "", attack: "", scope: "view", sort: "", theme: "auto" };
const state = { ...DEFAULTS };
let data = null;

const text = (index) => data.texts[index];
const metricNamed = (name) => data.metrics.find((metric) => metric.name === name);
const settingTitle = (index) => data.settings[index].title;
const isValid = (view) => data.comparisons[view.comparison].valid;
// A row's metric, by the names of its fields; null if its attack does not yield it.
function figuresOf(row, name) {
  const values = row.metrics[name];
  return values ? Object.fromEntries(data.metric_fields.map((field, i) => [field, values[i]])) : null;
}

const VALUES = {
  setting: (view) => String(view.setting),
  threat: (view) => text(view.threat),
  vantage: (view) => view.vantage,
  batch: (view) => String(view.batch),
  round: (view) => String(view.round),
};

// Views that agree with all that is chosen before `key`.
function viewsBefore(key) {
  const earlier = KEYS.slice(0, KEYS.indexOf(key));
  return data.views.filter((view) => earlier.every((name) => VALUES[name](view) === state[name]));
}

function optionsOf(key) {
  if (key === "setting") return data.settings.map((_, index) => String(index));
  const views = viewsBefore(key);
  if (key === "metric") return views.length ? Object.keys(views[0].worst) : [];
  const values = [...new Set(views.map(VALUES[key]))];
  return key === "batch" || key === "round" ? values.sort((a, b) => a - b) : values;
}

const USUAL = { metric: "psnr", vantage: "server" };

// Replaces every choice that the data does not have by the first one that it has.
function settle() {
  for (const key of KEYS) {
    const options = optionsOf(key);
    if (options.includes(state[key])) continue;
    if (key === "setting") {
      const valid = data.views.find(isValid);
      state[key] = valid ? String(valid.setting) : options[0];
    } else if (key === "round") state[key] = options[options.length - 1];
    else state[key] = options.includes(USUAL[key]) ? USUAL[key] : options[0];
  }
}

const currentView = () => viewsBefore("metric")[0] ?? null;

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const key of [...KEYS, ...Object.keys(DEFAULTS)]) {
    state[key] = wanted.get(key) ?? DEFAULTS[key];
  }
  const titled = data.settings.findIndex((setting) => setting.title === state.setting);
  state.setting = titled < 0 ? undefined : String(titled);
  settle();
}

function writeAddress() {
  const chosen = new URLSearchParams();
  for (const key of KEYS) if (state[key] !== undefined) chosen.set(key, state[key]);
  if (data.settings.length) chosen.set("setting", settingTitle(state.setting));
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    if (state[key] !== usual) chosen.set(key, state[key]);
  }
  history.replaceState(null, "", `#${chosen}`);
}
