// Line charts of the last minutes, drawn as SVG without any library.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320, HEIGHT = 150, LEFT = 54, RIGHT = 6, TOP = 8, BOTTOM = 20;

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// The smallest 1, 2 or 5 times a power of ten that is not below the value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value >= 10) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return value >= 0.01 ? `${(value * 1000).toFixed(0)} ms` : `${(value * 1000).toFixed(1)} ms`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || value === 0 ? value.toFixed(0) : value.toFixed(1);
}

export class Chart {
  // series: [{ key, name, colour }]; format: number to text
  constructor(parent, series, format) {
    this.series = series;
    this.format = format;
    this.points = [];
    this.pointed = null;
    this.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    parent.append(this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.pointed = null; this.draw(); });
  }

  update(points, bucketS) {
    this.points = points;
    this.bucketS = bucketS;
    this.draw();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = Math.min(box.width / WIDTH, box.height / HEIGHT);
    const x = (event.clientX - box.left - (box.width - WIDTH * scale) / 2) / scale;
    const share = (x - LEFT) / (WIDTH - LEFT - RIGHT);
    const index = Math.round(share * (this.points.length - 1));
    this.pointed = index >= 0 && index < this.points.length ? index : null;
    this.draw();
  }

  x(index) { return LEFT + (index / Math.max(1, this.points.length - 1)) * (WIDTH - LEFT - RIGHT); }
  y(value, top) { return HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM); }

  draw() {
    const values = this.series.flatMap(({ key }) => this.points.map((point) => point[key] ?? 0));
    const highest = Math.max(0, ...values);
    const top = highest > 0 ? roundUp(highest) : 1;
    this.svg.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const y = this.y(top * share, top);
      this.svg.append(
        element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        element("text", { class: "axis", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, highest > 0 || share === 0 ? this.format(top * share) : ""),
      );
    }
    const minutes = (this.points.length * this.bucketS) / 60;
    this.svg.append(
      element("text", { class: "axis", x: LEFT, y: HEIGHT - 4 }, `${minutes.toFixed(0)} min ago`),
      element("text", { class: "axis", x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
    );
    for (const { key, colour } of this.series) this.drawSeries(key, colour, top);
    if (this.pointed !== null) {
      const x = this.x(this.pointed);
      this.svg.append(element("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.setAttribute("aria-label", this.description());
    this.drawLegend();
  }

  // Buckets without a sample are gaps; a sample with gaps on both sides is a dot.
  drawSeries(key, colour, top) {
    let path = "", isOpen = false;
    this.points.forEach((point, index) => {
      const value = point[key];
      if (value === null || value === undefined) { isOpen = false; return; }
      const x = this.x(index).toFixed(1), y = this.y(value, top).toFixed(1);
      path += `${isOpen ? "L" : "M"}${x} ${y}`;
      isOpen = true;
      const isAlone = [index - 1, index + 1].every((near) => (this.points[near]?.[key] ?? null) === null);
      if (isAlone || index === this.pointed) {
        const dot = element("circle", { class: "dot", cx: x, cy: y, r: 3.5 });
        dot.style.fill = `var(${colour})`;
        this.svg.append(dot);
      }
    });
    const line = element("path", { class: "series", d: path });
    line.style.stroke = `var(${colour})`;
    this.svg.append(line);
  }

  shown() {
    const index = this.pointed ?? this.points.length - 1;
    return { point: this.points[index] ?? {}, agoS: (this.points.length - index) * this.bucketS };
  }

  description() {
    const { point } = this.shown();
    return this.series.map(({ key, name }) => `${name}: ${this.format(point[key])}`).join(", ");
  }

  drawLegend() {
    const { point, agoS } = this.shown();
    this.legend.replaceChildren(...this.series.map(({ key, name, colour }) => {
      const entry = document.createElement("span");
      const mark = document.createElement("i");
      mark.style.background = `var(${colour})`;
      const value = document.createElement("b");
      value.textContent = this.format(point[key]);
      entry.append(mark, `${name} `, value);
      return entry;
    }));
    if (this.pointed !== null) this.legend.append(`${agoS.toFixed(0)} s ago`);
  }
}
