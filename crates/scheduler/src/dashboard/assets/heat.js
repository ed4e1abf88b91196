// The map with one square per node. It is a single canvas element, even for 10,000 nodes.

import { h } from "./dom.js";
import { count, link, model, points } from "./format.js";
import { t } from "./text.js";

const GRADES = [0, 25, 50, 75, 99, 100];
const LEAST_GROUP = 150;
const MOVES = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
const grade = (percent) => GRADES.findIndex((most) => percent <= most);

/** Tells whether a computed colour is dark, so that text on it must be light. */
function isDark(colour) {
  const [red = 0, green = 0, blue = 0] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  const scale = colour.startsWith("color(") ? 255 : 1;
  return (0.299 * red + 0.587 * green + 0.114 * blue) * scale < 140;
}

/** Returns the number of characters that all names begin with, up to a separator, so that the rest tells nodes apart. */
function commonStart(names) {
  const [first = ""] = names;
  let end = 0;
  while (end < first.length && names.every((name) => name[end] === first[end])) end += 1;
  return first.slice(0, end).search(/[^-._]*$/);
}

/** Creates the map. `update(groups)` paints new data. */
export function heatMap(signal) {
  let groups = [];
  let squares = [];
  let cursor = -1;
  let side = 0;
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": t("over.map") });
  const told = h("p", { class: "heat-told", role: "status" });
  // The swatches are the legend, and the painter reads the colours of the theme from them.
  const swatches = GRADES.map((_, number) => h("span", { class: `swatch heat${number}` }));
  const alarm = h("span", { class: "swatch alarm" });
  const legend = h("p", { class: "heat-legend" }, swatches.map((swatch, number) => h("span", {}, swatch, t(`fullness.${number}`))), h("span", {}, alarm, t("over.trouble")));
  const element = h("div", { class: "heat", "data-keep": true }, legend, canvas, told);

  function paint() {
    const wide = element.clientWidth;
    if (!wide) return;
    const total = groups.reduce((sum, group) => sum + group.nodes.length, 0);
    const size = total > 2000 ? 9 : total > 400 ? 13 : total > 60 ? 20 : 34;
    const [step, line] = [size + 2, 20];
    const columns = Math.max(1, Math.floor(wide / step));
    squares = [];
    const titles = [];
    let [left, top, bottom] = [0, 0, 0];
    for (const group of groups) {
      // Small groups are placed side by side.
      const across = Math.max(LEAST_GROUP, Math.min(columns, group.nodes.length) * step);
      if (left > 0 && left + across > wide) [left, top] = [0, bottom];
      titles.push([`${model(group.model)} (${count(group.nodes.length)})`, left, top + 13]);
      // The only node of a group is told from the nodes of the others.
      const start = commonStart((group.nodes.length > 1 ? [group] : groups).flatMap(({ nodes }) => nodes.map(([name]) => name)));
      group.nodes.forEach(([name, percent, trouble], place) => {
        squares.push({ name, label: name.slice(start).slice(-5), percent, trouble, x: left + (place % columns) * step, y: top + line + Math.floor(place / columns) * step });
      });
      bottom = Math.max(bottom, top + line + Math.ceil(group.nodes.length / columns) * step + 10);
      left += across + 24;
    }
    top = bottom;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = wide * ratio;
    canvas.height = top * ratio;
    canvas.style.setProperty("height", `${top}px`);
    const style = getComputedStyle(element);
    const paints = swatches.map((swatch) => getComputedStyle(swatch).backgroundColor);
    const { borderColor: red, outlineColor: focus } = getComputedStyle(alarm);
    const ink = canvas.getContext("2d");
    ink.scale(ratio, ratio);
    ink.font = `12px ${style.fontFamily}`;
    ink.fillStyle = style.color;
    titles.forEach(([text, x, y]) => ink.fillText(text, x, y, wide));
    for (const square of squares) {
      ink.fillStyle = paints[grade(square.percent)];
      ink.fillRect(square.x, square.y, size, size);
      if (size >= 34) {
        // Large squares show what tells the nodes of a group apart.
        ink.fillStyle = isDark(paints[grade(square.percent)]) ? "#fff" : "#222";
        ink.font = `10px ${style.fontFamily}`;
        ink.fillText(square.label, square.x + 3, square.y + size - 5, size - 6);
      }
      if (square.trouble) {
        ink.strokeStyle = red;
        ink.lineWidth = 2;
        ink.strokeRect(square.x + 1, square.y + 1, size - 2, size - 2);
      }
    }
    if (squares[cursor]) {
      ink.strokeStyle = focus;
      ink.lineWidth = 2;
      ink.strokeRect(squares[cursor].x - 1, squares[cursor].y - 1, size + 2, size + 2);
    }
    canvas.setAttribute("aria-label", t("over.map.label", { n: count(squares.length) }));
    side = size;
  }

  function at(event) {
    return squares.findIndex((square) =>
      event.offsetX >= square.x && event.offsetX < square.x + side + 2 && event.offsetY >= square.y && event.offsetY < square.y + side + 2);
  }

  function tell(place) {
    const square = squares[place];
    canvas.style.setProperty("cursor", square ? "pointer" : "default");
    if (!square) return;
    const key = square.trouble ? "over.map.trouble" : "over.map.square";
    told.textContent = t(key, { name: square.name, part: points(square.percent), n: square.trouble });
  }

  /** Returns the next square: the neighbour for left and right, the nearest square of another
   *  row for up and down. */
  function next([step, rows]) {
    if (step) return Math.min(squares.length - 1, Math.max(0, cursor + step));
    const here = squares[cursor];
    const far = (square) => 100 * Math.abs(square.y - here.y) + Math.abs(square.x - here.x);
    return squares.reduce((best, square, place) => {
      if ((square.y - here.y) * rows <= 0) return best;
      return best === cursor || far(square) < far(squares[best]) ? place : best;
    }, cursor);
  }

  function visit(place) {
    if (squares[place]) location.hash = link("node", squares[place].name);
  }

  canvas.addEventListener("mousemove", (event) => tell(at(event)));
  canvas.addEventListener("click", (event) => visit(at(event)));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter") visit(cursor);
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    cursor = cursor < 0 ? 0 : next(MOVES[event.key]);
    paint();
    tell(cursor);
  });
  new ResizeObserver(() => paint()).observe(element);
  window.addEventListener("themechange", paint, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint, { signal });

  return {
    /** Returns the map, or a placeholder for it if the page is drawn again. */
    place: () => (element.isConnected ? h("div", { class: "heat", "data-keep": true }) : element),
    update(fresh) {
      groups = fresh.toSorted((a, b) => b.nodes.length - a.nodes.length);
      paint();
    },
  };
}
