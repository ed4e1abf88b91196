// A small chart of allocated and used GPUs over the last hours.

import { h, svg } from "./dom.js";
import { decimal, time } from "./format.js";
import { t } from "./text.js";

const [WIDE, HIGH] = [240, 44];

/** Draws the history of `all` GPUs. The area is what pods hold, the line what they use. */
export function sparkline(history, all) {
  if (history.length < 2) return h("p", { class: "muted" }, t("spark.none"));
  const [first, last] = [history[0].unixMillis, history.at(-1).unixMillis];
  const x = (point) => (WIDE * (point.unixMillis - first)) / Math.max(1, last - first);
  const y = (value) => HIGH - (HIGH - 2) * Math.min(1, value / Math.max(1, all));
  const places = (points, value) => points.map((point) => `${x(point).toFixed(1)},${y(value(point)).toFixed(1)}`).join(" ");
  const measured = history.filter((point) => point.used !== undefined);
  const now = history.at(-1);
  const label = t("spark.label", { since: time(first), held: decimal(now.held), used: now.used === undefined ? "–" : decimal(now.used), all: decimal(all) });
  return svg("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("polygon", { class: "held", points: `0,${HIGH} ${places(history, (point) => point.held)} ${WIDE},${HIGH}` }),
    measured.length > 1 && svg("polyline", { class: "used", points: places(measured, (point) => point.used) }));
}
