// The frame around the pages: navigation, settings, and updates of the open page.

import { Problem, follow } from "./api.js";
import { h, morph } from "./dom.js";
import { link } from "./format.js";
import { LANGUAGES, language, recall, setLanguage, store, t } from "./text.js";
import overview from "./page-overview.js";
import nodes from "./page-nodes.js";
import node from "./page-node.js";
import pods from "./page-pods.js";
import pod from "./page-pod.js";
import quota from "./page-quota.js";
import waste from "./page-waste.js";
import whatIf from "./page-what-if.js";
import decisions from "./page-decisions.js";

// A page function gets the address parts, the parameters and a signal that fires when the user
// leaves the page. It returns `load()`, `draw(data)` and `cares(news)`. Optional are `every`, the
// interval of reloads without news, and `pace(data)`, the minimum time between reloads. A page that
// manages its own elements returns `mount(root)` and `told(news)` instead.
const PAGES = { overview, nodes, node, pods, pod, waste, quota, "what-if": whatIf, decisions };
const IN_NAVIGATION = ["overview", "nodes", "pods", "waste", "quota", "what-if", "decisions"];
const BELONGS_TO = { node: "nodes", pod: "pods" };

const THEMES = ["auto", "light", "dark"];
const STORED_THEME = "tessera.theme";

// Minimum time between two loads of a page in milliseconds, because a large cluster changes all the
// time.
const PACE = 400;

let open;
let theme = THEMES.includes(recall(STORED_THEME)) ? recall(STORED_THEME) : "auto";
let isLive = true;

const main = h("main", { id: "content", tabindex: "-1" });
const liveDot = h("span", { class: "live", role: "status" });
const header = h("header", { class: "top" });

function frame() {
  document.documentElement.lang = language();
  document.documentElement.dataset.theme = theme;
  const search = h("input", { type: "search", name: "q", placeholder: t("search"), "aria-label": t("search"), autocomplete: "off" });
  header.replaceChildren(
    h("a", { class: "brand", href: link("overview") }, h("img", { src: "assets/icon.svg", alt: "", width: 22, height: 22 }), t("name")),
    h("nav", { "aria-label": t("nav") }, IN_NAVIGATION.map((name) => h("a", { href: link(name), "data-page": name }, t(name)))),
    h("form", { class: "search", role: "search", onsubmit: (event) => {
      event.preventDefault();
      location.hash = link("nodes", { q: search.value.trim() });
    } }, search),
    h("div", { class: "settings", role: "group", "aria-label": t("settings") },
      liveDot,
      h("button", { type: "button", id: "theme", "aria-label": t(`theme.${theme}`), title: t(`theme.${theme}`), onclick: nextTheme },
        { auto: "◐", light: "☀", dark: "☾" }[theme]),
      h("select", { id: "language", "aria-label": t("language"), onchange: (event) => {
        setLanguage(event.target.value);
        frame();
        show();
      } }, Object.entries(LANGUAGES).map(([tag, name]) => h("option", { value: tag, lang: tag, selected: tag === language() }, name)))));
  document.querySelector(".skip").textContent = t("skip");
  showLive();
  markCurrent();
}

function nextTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  store(STORED_THEME, theme);
  frame();
  document.getElementById("theme").focus();
  // A canvas does not follow the style sheet, so it must be painted again.
  window.dispatchEvent(new Event("themechange"));
}

function showLive() {
  liveDot.classList.toggle("off", !isLive);
  liveDot.textContent = t(isLive ? "live.on" : "live.off");
}

function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  const name = parts.shift() || "overview";
  return { name: name in PAGES ? name : "overview", parts, parameters: Object.fromEntries(new URLSearchParams(query)) };
}

function markCurrent() {
  const { name } = address();
  for (const item of header.querySelectorAll("nav a")) {
    if (item.dataset.page === (BELONGS_TO[name] ?? name)) item.setAttribute("aria-current", "page");
    else item.removeAttribute("aria-current");
  }
}

function failure(error) {
  if (error instanceof Problem && error.notLeading) {
    return h("section", { class: "notice" },
      h("h1", {}, t("follower.title")),
      h("p", {}, error.leader ? t("follower.leader", { leader: error.leader }) : t("follower.none")),
      h("p", {}, t("follower.text")),
      h("pre", {}, "kubectl -n kube-system port-forward service/tessera-scheduler 12345:12345"));
  }
  return h("section", { class: "notice", role: "alert" },
    h("h1", {}, t("failed")),
    h("p", {}, String(error.message ?? error)),
    h("p", {}, h("a", { class: "button", href: location.hash || "#/", onclick: () => show() }, t("again"))));
}

function draw(content) {
  const fresh = h("div", { class: "page" }, content);
  if (main.firstElementChild) morph(main.firstElementChild, fresh);
  else main.append(fresh);
}

/** Loads and draws the page. Repeats if something changed during the load, and respects the
 *  pace. */
async function refresh(mine) {
  if (mine.busy) {
    mine.again = true;
    return;
  }
  mine.busy = true;
  do {
    mine.again = false;
    const early = (mine.next ?? 0) - performance.now();
    if (early > 0) await new Promise((done) => setTimeout(done, early));
    const begun = performance.now();
    try {
      mine.data = await mine.page.load();
      if (open !== mine) return;
      draw(mine.page.draw(mine.data));
    } catch (error) {
      if (open !== mine || error.name === "AbortError") return;
      // Without a connection the page keeps its data; the header shows the lost connection.
      if (error instanceof Problem || !mine.data) draw(failure(error));
    }
    // The page loads less often from a slow server.
    const took = performance.now() - begun;
    mine.next = performance.now() + Math.max(mine.page.pace?.(mine.data) ?? PACE, 2 * took);
  } while (mine.again && open === mine);
  mine.busy = false;
}

async function show() {
  open?.leave.abort();
  const { name, parts, parameters } = address();
  const leave = new AbortController();
  const mine = { leave };
  const redraw = () => {
    if (open === mine && mine.data) draw(mine.page.draw(mine.data));
  };
  const page = PAGES[name]({ parts, parameters, signal: leave.signal, redraw });
  mine.page = page;
  open = mine;
  markCurrent();
  document.title = [parts.at(-1), t(BELONGS_TO[name] ?? name), t("name")].filter(Boolean).join(" · ");
  main.replaceChildren(h("div", { class: "page" }, h("p", { class: "muted" }, t("loading"))));
  if (!page.mount) {
    if (page.every) {
      const timer = setInterval(() => document.hidden || refresh(mine), page.every);
      leave.signal.addEventListener("abort", () => clearInterval(timer));
    }
    return refresh(mine);
  }
  try {
    const root = h("div", { class: "page" });
    await page.mount(root);
    if (open === mine) main.replaceChildren(root);
    page.shown?.();
  } catch (error) {
    if (open === mine && error.name !== "AbortError") draw(failure(error));
  }
}

function told(news) {
  const { page } = open;
  const failed = main.querySelector(".notice");
  if (page.mount && failed) show();
  else if (page.mount) page.told(news);
  else if (news.all || failed || page.cares(news)) refresh(open);
}

document.body.replaceChildren(h("a", { class: "skip", href: "#content", onclick: (event) => {
  event.preventDefault();
  main.focus();
} }), header, main);
frame();
window.addEventListener("hashchange", () => {
  show();
  window.scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
show();
follow(told, (live) => {
  if (live === isLive) return;
  isLive = live;
  showLive();
});
showLive();
