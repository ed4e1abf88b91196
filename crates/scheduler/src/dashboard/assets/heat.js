// Every node as a square, painted: ten thousand of them are one element.

import { h } from "./dom.js";
import { count, link, model, points } from "./format.js";
import { t } from "./text.js";

const GRADES = [0, 25, 50, 75, 99, 100];
const grade = (percent) => GRADES.findIndex((most) => percent <= most);

/** The map, once. `update(groups)` paints what has changed. */
export function heatMap(signal) {
  let groups = [];
  let squares = [];
  let cursor = -1;
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": t("over.map") });
  const told = h("p", { class: "heat-told", role: "status" });
  // The legend, and where the painter finds the colours of the theme.
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
    let top = 0;
    for (const group of groups) {
      titles.push([`${model(group.model)} (${count(group.nodes.length)})`, top + 13]);
      top += line;
      group.nodes.forEach(([name, percent, trouble], place) => {
        squares.push({ name, percent, trouble, x: (place % columns) * step, y: top + Math.floor(place / columns) * step });
      });
      top += Math.ceil(group.nodes.length / columns) * step + 10;
    }
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
    titles.forEach(([text, y]) => ink.fillText(text, 0, y, wide));
    for (const square of squares) {
      ink.fillStyle = paints[grade(square.percent)];
      ink.fillRect(square.x, square.y, size, size);
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
    Object.assign(canvas, { size, columns });
  }

  function at(event) {
    return squares.findIndex((square) =>
      event.offsetX >= square.x && event.offsetX < square.x + canvas.size + 2 && event.offsetY >= square.y && event.offsetY < square.y + canvas.size + 2);
  }

  function tell(place) {
    const square = squares[place];
    canvas.style.setProperty("cursor", square ? "pointer" : "default");
    if (!square) return;
    const key = square.trouble ? "over.map.trouble" : "over.map.square";
    told.textContent = t(key, { name: square.name, part: points(square.percent), n: square.trouble });
  }

  function visit(place) {
    if (squares[place]) location.hash = link("node", squares[place].name);
  }

  canvas.addEventListener("mousemove", (event) => tell(at(event)));
  canvas.addEventListener("click", (event) => visit(at(event)));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: canvas.columns, ArrowUp: -canvas.columns }[event.key];
    if (event.key === "Enter") visit(cursor);
    if (move === undefined) return;
    event.preventDefault();
    cursor = cursor < 0 ? 0 : Math.min(squares.length - 1, Math.max(0, cursor + move));
    paint();
    tell(cursor);
  });
  new ResizeObserver(() => paint()).observe(element);
  window.addEventListener("themechange", paint, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint, { signal });

  return {
    /** The map itself at first; later what stands for it in a page that is drawn anew. */
    place: () => (element.isConnected ? h("div", { class: "heat", "data-keep": true }) : element),
    update(fresh) {
      groups = fresh.toSorted((a, b) => b.nodes.length - a.nodes.length);
      paint();
    },
  };
}
