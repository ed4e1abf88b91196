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
  let polling;
  const source = new EventSource(BASE + "stream");
  source.addEventListener("change", (event) => {
    const news = JSON.parse(event.data);
    // A repeated version after a reconnection is no news; a gap, or a smaller number of a new process, is all news.
    const all = version !== undefined && news.version !== version + 1 && news.version !== version;
    const first = version === undefined;
    const again = news.version === version;
    version = news.version;
    live(true);
    if (!first && !again) told({ ...news, all: all || news.manyNodes });
    if (first && news.version > 1) told({ ...news, all: true });
  });
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
