// Formats figures, and makes elements. Data reaches the page as text alone, never as markup.
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const isNumber = (value) => typeof value === "number";
const minus = (text) => text.replace("-", "−");

function number(value, metric) {
  if (!isNumber(value)) return "–";
  if (metric.percent) return minus(`${(100 * value).toFixed(0)}%`);
  return minus((Number(value.toFixed(metric.digits)) + 0).toFixed(metric.digits));
}

function signed(value, metric) {
  if (!isNumber(value)) return "–";
  const text = number(value, metric);
  return text.startsWith("−") ? text : `+${text}`;
}

const unitOf = (metric) => (metric.unit === "dB" ? " dB" : metric.unit === "degrees" ? "°" : "");

function interval(low, high, metric, format = number) {
  return isNumber(low) && isNumber(high) ? ` [${format(low, metric)}, ${format(high, metric)}]` : "";
}

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
