// A small chart of allocated and used GPUs over the last hours.

import { h, svg } from "./dom.js";
import { bound, decimal, time } from "./format.js";
import { t } from "./text.js";

const [WIDE, HIGH] = [240, 44];

/** Divides the measured points into lines. A line ends where nothing was measured, and a lower bound has a line of its
 *  own that begins at the point before it. */
function lines(history) {
  const all = [];
  let before;
  for (const point of history) {
    const isPartial = point.unknownPods > 0;
    const line = all.at(-1);
    if (point.used === undefined) {
      before = undefined;
    } else if (before && line.isPartial === isPartial) {
      line.points.push(point);
      before = point;
    } else {
      all.push({ isPartial, points: [before, point].filter(Boolean) });
      before = point;
    }
  }
  return all.filter(({ points }) => points.length > 1);
}

/** Draws the history of `all` GPUs. The area is what pods hold, the lines what they use. */
export function sparkline(history, all) {
  if (history.length < 2) return h("p", { class: "muted" }, t("spark.none"));
  const [first, last] = [history[0].unixMillis, history.at(-1).unixMillis];
  const x = (point) => (WIDE * (point.unixMillis - first)) / Math.max(1, last - first);
  const y = (value) => HIGH - (HIGH - 2) * Math.min(1, value / Math.max(1, all));
  const places = (points, value) => points.map((point) => `${x(point).toFixed(1)},${y(value(point)).toFixed(1)}`).join(" ");
  const now = history.at(-1);
  const label = t("spark.label", { since: time(first), held: decimal(now.held), used: now.used === undefined ? "–" : bound(decimal(now.used), now.unknownPods > 0), all: decimal(all) });
  return svg("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("polygon", { class: "held", points: `0,${HIGH} ${places(history, (point) => point.held)} ${WIDE},${HIGH}` }),
    lines(history).map(({ isPartial, points }) => svg("polyline", { class: isPartial ? "used partial" : "used", points: places(points, (point) => point.used) })));
}
