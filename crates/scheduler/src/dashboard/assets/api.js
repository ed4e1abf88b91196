// What the server knows, and when it changes.

/** An answer that is none: with the server's words, and whether another replica leads. */
export class Problem extends Error {
  constructor(message, code, body) {
    super(message);
    this.code = code;
    this.leader = body?.leader;
    this.notLeading = code === 503 && body?.ready === false;
  }
}

// Relative, so that the page also works behind a proxy with a path of its own.
const BASE = "api/v1/";

async function ask(path, options) {
  const answer = await fetch(BASE + path, options);
  const body = await answer.json().catch(() => undefined);
  if (!answer.ok) throw new Problem(body?.error ?? `${answer.status} ${answer.statusText}`, answer.status, body);
  return body;
}

export const get = (path, signal) => ask(path, { signal });
export const post = (path, body, signal) => ask(path, { method: "POST", body, signal });

/** A path of parts that may contain anything. */
export const path = (...parts) => parts.map(encodeURIComponent).join("/");

/** A path with the parameters that are set. */
export function query(path, parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  return `${path}?${new URLSearchParams(kept)}`;
}

const POLL = 5000;

/** Follows the stream of changes. `told(news)` is called with each; `live(yes)` when the connection comes or goes. Whoever missed
 *  a version is told to look at everything again: `news.all`. Where no stream is to be had, it asks now and then. */
export function follow(told, live) {
  let version;
  let source;
  let polling;

  function changed(event) {
    const news = JSON.parse(event.data);
    const before = version;
    version = news.version;
    live(true);
    if (before === version) return;
    // A first version above one, a gap, or the smaller number of a new process: everything may be different.
    told({ ...news, all: before === undefined ? version > 1 : version !== before + 1 || news.manyNodes });
  }

  function start() {
    if (source || document.hidden) return;
    source = new EventSource(BASE + "stream");
    source.addEventListener("change", changed);
    source.addEventListener("open", () => {
      clearInterval(polling);
      polling = undefined;
      live(true);
    });
    source.addEventListener("error", () => {
      live(false);
      polling ??= setInterval(() => told({ all: true, nodes: [] }), POLL);
    });
  }

  function stop() {
    source?.close();
    source = undefined;
    clearInterval(polling);
    polling = undefined;
  }

  // A browser has six connections for all pages of a site: those that nobody looks at must not hold any.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", start);
  start();
}
