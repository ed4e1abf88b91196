// A row of filters whose values are stored in the address.

import { get } from "./api.js";
import { h } from "./dom.js";
import { link, model } from "./format.js";
import { t } from "./text.js";

export const DIALECTS = ["nvidia", "gputopology", "gpushare", "vcuda", "hami"];

/** Creates the filter form of a page. `searched` is the parameter of the search; `states`, `outcomes` and `sorts` list
 *  values as [value, text]; each change calls `changed(parameters)`. */
export async function filterForm(page, parameters, { searched = "q", states, outcomes, fullness, sorts, changed, signal }) {
  const { models, namespaces } = await get("cluster", signal);
  const values = { ...parameters };
  let timer;

  function apply() {
    const kept = Object.fromEntries(Object.entries(values).filter(([, value]) => value));
    // Typing must not add a history entry for every letter.
    history.replaceState(null, "", link(page, kept));
    clear.hidden = Object.keys(kept).length === 0;
    changed(kept);
  }

  function choice(name, label, options) {
    // Every list has an order, so the first order stands for the address without one.
    const [usual, rest] = options[0]?.[0] === "" ? [options[0][1], options.slice(1)] : [t("filter.all"), options];
    const known = options.some(([value]) => value === (values[name] ?? ""));
    const all = known || !values[name] ? rest : [...rest, [values[name], values[name]]];
    const select = h("select", { name, onchange: () => {
      values[name] = select.value;
      apply();
    } }, h("option", { value: "" }, usual),
    all.map(([value, text]) => h("option", { value, selected: value === values[name] }, text)));
    return h("label", {}, h("span", {}, label), select);
  }

  const search = h("input", { type: "search", name: searched, value: values[searched] ?? "", autocomplete: "off", oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      values[searched] = search.value.trim();
      apply();
    }, 200);
  } });
  const clear = h("a", { class: "button quiet", href: link(page), hidden: Object.keys(parameters).length === 0 }, t("filter.clear"));
  return h("form", { class: "filters", role: "search", "data-keep": true, "aria-label": t("filter"), onsubmit: (event) => event.preventDefault() },
    h("label", { class: "wide" }, h("span", {}, t("search")), search),
    choice("namespace", t("namespace"), namespaces.map(({ namespace }) => [namespace, namespace])),
    states && choice("model", t("model"), [...new Set(models.map((view) => view.model))].map((name) => [name, model(name)])),
    states && choice("dialect", t("dialect"), DIALECTS.map((name) => [name, name])),
    states && choice("state", t("state"), states),
    outcomes && choice("outcome", t("outcome"), outcomes),
    sorts && choice("sort", t("filter.sort"), sorts),
    fullness && choice("fullness", t("fullness"), [0, 1, 2, 3, 4, 5].map((grade) => [String(grade), t(`fullness.${grade}`)])),
    clear);
}
