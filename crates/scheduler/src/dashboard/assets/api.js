// Access to the JSON API and to the stream of changes.

/** An error response of the server, with its message and the name of the leader if another
 *  replica leads. */
export class Problem extends Error {
  constructor(message, code, body) {
    super(message);
    this.code = code;
    this.leader = body?.leader;
    this.notLeading = code === 503 && body?.ready === false;
  }
}

// A relative path also works behind a proxy that adds a path prefix.
const BASE = "api/v1/";

async function ask(path, options) {
  const answer = await fetch(BASE + path, options);
  // The login has ended, or the page was opened before it.
  if (answer.status === 401) location.assign("login");
  const body = await answer.json().catch(() => undefined);
  if (!answer.ok) throw new Problem(body?.error ?? `${answer.status} ${answer.statusText}`, answer.status, body);
  return body;
}

export const get = (path, signal) => ask(path, { signal });
export const post = (path, body, signal) => ask(path, { method: "POST", body, signal });

/** Joins path segments; each segment may contain any character. */
export const path = (...parts) => parts.map(encodeURIComponent).join("/");

/** Appends the parameters that are set to a path. */
export function query(path, parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  return `${path}?${new URLSearchParams(kept)}`;
}

const POLL = 5000;

/** Follows the stream of changes. It calls `told(news)` for each change and `live(connected)`
 *  when the connection opens or breaks. `news.all` is set if the client missed a version and
 *  must load everything again. Without a stream it polls. */
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
    // Everything may have changed after a first version above one, a gap, or the restart of the
    // server.
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

  // A browser allows six connections per site, so a hidden page must not hold one.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", start);
  start();
}
