// A virtual list: it loads page by page and creates elements only for visible items.

import { h, morph } from "./dom.js";

const AT_ONCE = 60;

// Minimum time between two reloads of the visible items, in milliseconds.
const PACE = 400;

/** Creates a list of cards of equal height. `load(offset, limit)` returns `{total, items}`,
 *  `draw(item)` returns an element, and each answer calls `counted(total)`. */
export function virtualList({ load, draw, counted, failed, signal, least, height }) {
  let total = 0;
  let pages = new Map();
  let wanted = 0;
  let next = 0;
  let later;
  const shown = new Map();
  const element = h("div", { class: "virtual", role: "list", "data-keep": true });

  function columns() {
    return Math.max(1, Math.floor((element.clientWidth + 12) / (least + 12)));
  }

  /** Returns the range of visible positions, with one more row on each side. */
  function range() {
    const across = columns();
    const top = -element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / height) - 1);
    const last = Math.ceil((top + window.innerHeight) / height) + 1;
    return [first * across, Math.min(total, last * across)];
  }

  function place(card, number) {
    const across = columns();
    const part = 100 / across;
    card.style.setProperty("--top", `${Math.floor(number / across) * height}px`);
    card.style.setProperty("--left", `${(number % across) * part}%`);
    card.style.setProperty("--width", `${part}%`);
    card.setAttribute("aria-posinset", String(number + 1));
    card.setAttribute("aria-setsize", String(total));
  }

  function paint() {
    element.style.setProperty("height", `${Math.ceil(total / columns()) * height}px`);
    const [first, last] = range();
    for (const [number, card] of shown) {
      if (number < first || number >= last) {
        card.remove();
        shown.delete(number);
      }
    }
    for (let number = first; number < last; number += 1) {
      const page = pages.get(Math.floor(number / AT_ONCE));
      const item = page?.items?.[number % AT_ONCE];
      if (!page) fetchPage(Math.floor(number / AT_ONCE));
      if (!item) continue;
      let card = shown.get(number);
      if (!card) {
        card = h("div", { class: "slot", role: "listitem" }, draw(item));
        shown.set(number, card);
        // Elements stay in list order, so that the tab key follows the visual order.
        const next = [...shown.keys()].filter((other) => other > number).sort((a, b) => a - b)[0];
        element.insertBefore(card, shown.get(next) ?? null);
      } else if (card.item !== item) morph(card.firstElementChild, draw(item));
      card.item = item;
      place(card, number);
    }
  }

  async function fetchPage(number) {
    const round = wanted;
    const old = pages.get(number);
    if (old?.loading) return;
    const page = { ...old, loading: true };
    pages.set(number, page);
    try {
      const answer = await load(number * AT_ONCE, AT_ONCE);
      if (round !== wanted) return;
      page.items = answer.items;
      if (answer.total !== total) {
        total = answer.total;
        for (const known of pages.keys()) if (known * AT_ONCE >= total && known > 0) pages.delete(known);
      }
      counted(total);
      paint();
    } catch (error) {
      if (error.name !== "AbortError" && round === wanted) failed(error);
    } finally {
      page.loading = false;
      if (page.stale && round === wanted) {
        page.stale = false;
        fetchPage(number);
      }
    }
  }

  let due = false;
  function soon() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (!signal.aborted) paint();
    });
  }
  window.addEventListener("scroll", soon, { signal, passive: true });
  new ResizeObserver(soon).observe(element);

  return {
    element,
    paint,
    /** Shows another list from its start. */
    async reset() {
      wanted += 1;
      pages = new Map();
      total = 0;
      shown.forEach((card) => card.remove());
      shown.clear();
      await fetchPage(0);
    },
    /** Reloads the visible items of a changed list. Other items are loaded when they become
     *  visible. */
    refresh() {
      const early = next - performance.now();
      if (early > 0) {
        later ??= setTimeout(() => {
          later = undefined;
          if (!signal.aborted) this.refresh();
        }, early);
        return;
      }
      next = performance.now() + PACE;
      const [first, last] = range();
      const seen = new Set();
      for (let number = first; number < Math.max(last, 1); number += AT_ONCE) seen.add(Math.floor(number / AT_ONCE));
      if (last > first) seen.add(Math.floor((last - 1) / AT_ONCE));
      for (const number of pages.keys()) if (!seen.has(number)) pages.delete(number);
      for (const number of seen) {
        const page = pages.get(number);
        if (page?.loading) page.stale = true;
        else fetchPage(number);
      }
    },
    /** Returns whether a loaded item passes the test. */
    has: (passes) => [...pages.values()].some((page) => page.items?.some(passes)),
  };
}
