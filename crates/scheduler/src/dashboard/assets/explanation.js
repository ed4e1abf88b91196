// Shows why a pod waits, where it is and why, or where a hypothetical pod would fit.

import { h } from "./dom.js";
import { count, link, moment } from "./format.js";
import { bar } from "./tile.js";
import { placementReason, reason, t } from "./text.js";

const nodeLink = (name) => h("a", { href: link("node", name) }, name);

function best(views, waits) {
  return h("section", {},
    h("h3", {}, t(waits ? "explain.free-gpus" : "explain.best")),
    h("ul", { class: "plain places" }, views.map((view) => h("li", { "data-key": view.node },
      nodeLink(view.node), " ", h("span", { class: "muted" }, t("explain.wouldget")), " ",
      view.gpus.map((container) => h("span", { class: "chip" }, `${container.container && `${container.container}: `}${t("gpu.n", { n: container.gpus.join(", ") })}`))))));
}

function gpuReasons(view) {
  return h("li", { "data-key": view.node }, nodeLink(view.node), view.container && h("span", { class: "muted" }, ` (${t("container")} ${view.container})`),
    view.gpuReasons && h("ul", { class: "plain gpu-reasons" }, view.gpuReasons.map((gpu) => h("li", {},
      h("span", { class: "figure" }, t("gpu.n", { n: gpu.gpu })), " ",
      gpu.reason === null ? h("span", { class: "good" }, t("explain.free")) : h("span", { title: gpu.reason }, reason(gpu.reason))))));
}

function refusals(groups, all, title) {
  return h("section", {},
    h("h3", {}, title),
    h("ul", { class: "plain refusals" }, groups.map((group) => h("li", { "data-key": group.reason },
      h("p", {},
        h("strong", { class: "figure" }, t("nodes.count", { n: count(group.nodes) })), ": ",
        h("span", { title: group.reason }, reason(group.reason))),
      bar([["plain-part", group.nodes]], all),
      h("p", { class: "muted" }, t("explain.evictions"), " ", t(group.mayResolve ? "explain.resolve" : "explain.noresolve")),
      group.examples.some((view) => view.gpuReasons) && h("details", {},
        h("summary", {}, t("explain.examples", { n: count(group.examples.length) })),
        h("ul", { class: "plain" }, group.examples.map(gpuReasons)))))));
}

/** Shows what kube-scheduler itself says about a pod that waits. Its word comes first. */
function verdict(found) {
  const report = found.kubeScheduler;
  const kept = found.reservation && reason(found.reservation);
  if (!report) {
    const unreported = !found.gang && h("p", { class: "lead" }, t("explain.unreported", { scheduler: found.unreported ?? "?" }));
    return [unreported, kept && h("p", { class: "lead" }, kept)];
  }
  return h("p", { class: "lead verdict" }, h("strong", {}, "kube-scheduler: "), report.message || report.reason,
    report.since && h("span", { class: "muted" }, ` (${t("explain.since", { when: moment(report.since) })})`),
    kept && h("span", { class: "muted" }, ` · ${kept}`));
}

function summary(found) {
  const values = { n: count(found.wouldDo), all: count(found.checked) };
  const undecided = found.waits || found.unchecked?.length > 0;
  const key = undecided ? "explain.would-do" : found.wouldDo > 0 ? "explain.fits" : "explain.nowhere";
  return h("p", { class: found.waits ? "" : "lead" }, t(key, values), " ", h("span", { class: "muted" }, t("explain.policy", { policy: found.policy })));
}

/** Shows where a placed pod is and why it got these GPUs. */
export function placement(found) {
  return h("div", { class: "explanation" },
    h("p", { class: "lead" }, t("explain.placed"), " ", nodeLink(found.placedOn), found.holds?.length > 0 && `: ${found.holds.join(" · ")}`),
    h("p", { class: found.placementReason ? "" : "muted" }, found.placementReason ? placementReason(found.placementReason) : t("explain.no-reason")));
}

export function explanation(found) {
  if (found.problem) return h("p", { class: "bad" }, t("pod.problem"), ": ", found.problem);
  if (found.placedOn) return placement(found);
  return h("div", { class: "explanation" },
    found.waits && verdict(found),
    found.gang && h("p", { class: "lead" }, reason(found.gang)),
    found.unserved?.length > 0 && h("p", { class: "warn" }, t("explain.unserved", { resources: found.unserved.join(", ") })),
    summary(found),
    found.unchecked?.length > 0 && h("p", { class: "muted" }, t("explain.unchecked", { constraints: found.unchecked.map(reason).join(t("comma")) })),
    found.best.length > 0 && best(found.best, found.waits || found.unchecked?.length > 0),
    found.roomTotal > 0 && h("p", {}, t(found.roomOrMore ? "explain.roomOrMore" : "explain.room", { n: count(found.roomTotal) })),
    found.relief?.length > 0 && h("section", {}, h("h3", {}, t("explain.relief")),
      h("ul", { class: "plain" }, found.relief.map((one) => h("li", { "data-key": one.node }, nodeLink(one.node), ": ", one.pods.join(", "))))),
    found.smaller?.length > 0 && h("section", {}, h("h3", {}, t("explain.smaller")),
      h("ul", { class: "plain" }, found.smaller.map((one) => h("li", { "data-key": one.request }, h("span", { class: "chip whole" }, one.request), " ", nodeLink(one.node))))),
    found.refusals.length > 0 && refusals(found.refusals, found.checked, t(found.wouldDo > 0 ? "explain.refusals" : "explain.obstacles")));
}
