// The page that shows where a hypothetical pod would fit.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { explanation } from "./explanation.js";
import { link } from "./format.js";
import { t } from "./text.js";

const POLICIES = ["tessera", "link", "fragment", "share", "simple", "static", "best-effort", "binpack", "spread"];

// The kinds of requests: the text key, and the fields with their text key, resource name and
// default value.
const KINDS = {
  whole: ["whatif.whole", [["whatif.gpus", "nvidia.com/gpu", 1]]],
  topology: ["whatif.topology", [["whatif.gpus", "aliyun.com/gpu", 2]]],
  share: ["whatif.share", [["whatif.percent", "tencent.com/vcuda-core", 50], ["whatif.blocks", "tencent.com/vcuda-memory", 32]]],
  memory: ["whatif.memory", [["whatif.units", "aliyun.com/gpu-mem", 8]]],
  manifest: ["whatif.manifest", []],
};

const EXAMPLE = {
  metadata: { name: "supposed", namespace: "default" },
  spec: { containers: [{ name: "main", resources: { limits: { "nvidia.com/gpu": "1" } } }] },
};

export default function whatIf({ parameters, signal }) {
  const field = (label, input) => h("label", {}, h("span", {}, label), input);
  const result = h("section", { class: "card", role: "status", hidden: true });
  const submit = h("button", { type: "submit" }, t("whatif.ask"));
  // The form is part of the address, so that a link can name a request.
  const isAsked = parameters.kind in KINDS;
  const kind = h("select", { name: "kind", onchange: showFields }, Object.entries(KINDS).map(([value, [text]]) => h("option", { value, selected: value === parameters.kind }, t(text))));
  const namespace = h("input", { name: "namespace", value: parameters.namespace ?? "default", list: "namespaces" });
  const names = h("datalist", { id: "namespaces" });
  const cpu = h("input", { name: "cpu", value: isAsked ? parameters.cpu ?? "" : "4", inputmode: "decimal" });
  const policy = h("select", { name: "policy" }, h("option", { value: "" }, t("whatif.cluster")), POLICIES.map((name) => h("option", { value: name, selected: name === parameters.policy }, name)));
  const manifest = h("textarea", { name: "manifest", rows: 12, spellcheck: "false" });
  manifest.value = parameters.manifest ?? JSON.stringify(EXAMPLE, null, 2);
  const amounts = h("div", { class: "amounts" });
  const common = h("div", { class: "amounts" }, field(t("namespace"), namespace), field(t("whatif.cpu"), cpu), field(t("whatif.policy"), policy));

  function showFields() {
    const byHand = kind.value === "manifest";
    common.hidden = byHand;
    amounts.replaceChildren(...(byHand ? [field(t("whatif.manifest"), manifest)]
      : KINDS[kind.value][1].map(([label, resource, value]) => field(t(label), h("input", { type: "number", min: "0", name: resource, value: parameters[resource] ?? value })))));
  }

  function remember() {
    const chosen = kind.value === "manifest" ? { manifest: manifest.value }
      : { ...amountsOf(), namespace: namespace.value, cpu: cpu.value, policy: policy.value };
    history.replaceState(null, "", link("what-if", { kind: kind.value, ...chosen }));
  }

  const amountsOf = () => Object.fromEntries([...amounts.querySelectorAll("input")].map((input) => [input.name, input.value]));

  function pod() {
    if (kind.value === "manifest") return manifest.value;
    const limits = amountsOf();
    if (cpu.value) limits.cpu = cpu.value;
    const annotations = policy.value ? { "tessera.dev/policy": policy.value } : {};
    return JSON.stringify({
      metadata: { name: "supposed", namespace: namespace.value, annotations },
      spec: { containers: [{ resources: { limits } }] },
    });
  }

  function submitted(event) {
    event.preventDefault();
    remember();
    return ask();
  }

  async function ask() {
    submit.textContent = t("whatif.asking");
    result.hidden = false;
    try {
      result.replaceChildren(explanation(await post("what-if", pod(), signal)));
    } catch (error) {
      if (error.name !== "AbortError") result.replaceChildren(h("p", { class: "bad" }, error.message));
    }
    submit.textContent = t("whatif.ask");
  }

  return {
    async mount(root) {
      const { namespaces } = await get("cluster", signal);
      names.append(...namespaces.map((view) => h("option", { value: view.namespace })));
      showFields();
      root.append(
        h("div", { class: "page-head" }, h("h1", {}, t("what-if"))),
        h("p", { class: "muted" }, t("whatif.note")),
        h("form", { class: "card what-if", onsubmit: submitted, onchange: remember }, field(t("whatif.kind"), kind), amounts, common, names, h("p", {}, submit)),
        result);
      if (isAsked) await ask();
    },
    told() {},
  };
}
