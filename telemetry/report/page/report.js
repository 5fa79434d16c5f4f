// What the page can do beyond being read: switch themes, and read and zoom the timelines.
"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = isDark() ? "Light theme" : "Dark theme"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
  nameTheme();

  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => seen.observe(section));

  // Numbers as the page's own: three significant digits.
  const digits = (v) => Number.isInteger(v) ? v.toLocaleString("en")
    : v.toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
  const steps = { s: [[600, 60, "min"], [1, 1, "s"], [1e-3, 1e-3, "ms"], [1e-6, 1e-6, "µs"]],
    bytes: [[2 ** 30, 2 ** 30, "GiB"], [2 ** 20, 2 ** 20, "MiB"], [2 ** 10, 2 ** 10, "KiB"], [0, 1, "B"]] };
  const names = { count: "", ratio: "%", celsius: "°C" };
  const human = (v, unit) => {
    if (unit === "ratio") return `${digits(v * 100)} %`;
    if (!steps[unit]) return `${digits(v)} ${names[unit] ?? unit}`.trim();
    const fit = steps[unit].find(([least]) => v >= least);
    return fit ? `${digits(v / fit[1])} ${fit[2]}` : `${digits(v)} ${unit}`;
  };
  const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const clip = (v, low, high) => Math.min(high, Math.max(low, v));

  function timeline(element, data) {
    const lanes = element.querySelector(".lanes");
    const output = element.querySelector("output");
    const fields = [...element.querySelectorAll(".field")];
    const columns = data.lanes[0].columns;
    const view = { from: 0, to: columns };
    let at = null;
    element.querySelector(".tools").hidden = false;
    const cursor = Object.assign(document.createElement("i"), { className: "cursor", hidden: true });
    const chosen = Object.assign(document.createElement("i"), { className: "chosen", hidden: true });
    lanes.append(cursor, chosen);
    const chips = fields.map((field) =>
      field.appendChild(Object.assign(document.createElement("span"), { className: "chip", hidden: true })));
    let focused = 0;

    const place = (scale, v) => clip(scale.log ? Math.log(v / scale.low) / Math.log(scale.high / scale.low)
      : (v - scale.low) / (scale.high - scale.low), 0, 1);
    const seconds = (column) => column / columns * data.duration;

    function draw() {
      const width = view.to - view.from;
      data.lanes.forEach((lane, n) => {
        const x = (i) => ((lane.x[i] + .5 - view.from) / width * 1000).toFixed(1);
        const y = (v) => (8 + (1 - place(lane.scale, v)) * 184).toFixed(1);
        const gaps = lane.x.slice(1).map((c, i) => c - lane.x[i]).sort((a, b) => a - b);
        const farthest = Math.max(3, 4 * (gaps[gaps.length >> 1] ?? 0));
        let line = "", area = "", run = [];
        const close = () => {
          if (!run.length) return;
          line += "M" + run.map((i) => `${x(i)} ${y(lane.mid[i])}`).join("L") + (run.length > 1 ? "" : "h0");
          if (lane.low) area += "M" + run.map((i) => `${x(i)} ${y(lane.high[i])}`).join("L") + "L"
            + run.reverse().map((i) => `${x(i)} ${y(lane.low[i])}`).join("L") + "z";
          run = [];
        };
        lane.x.forEach((column, i) => {
          if (i && column - lane.x[i - 1] > farthest) close();
          if (column >= view.from - farthest && column <= view.to + farthest) run.push(i);
        });
        close();
        fields[n].querySelector(".line").setAttribute("d", line);
        fields[n].querySelector(".area").setAttribute("d", area);
      });
      const percent = (s) => ((s / data.duration * columns - view.from) / width * 1000);
      const events = element.querySelector(".events svg");
      if (events) {
        events.querySelectorAll(".mark").forEach((mark, i) => {
          const [a, b] = data.marks[i].map(percent);
          mark.querySelector("path").setAttribute("d", `M${a} 20v160`);
          mark.querySelector("rect").setAttribute("x", a);
          mark.querySelector("rect").setAttribute("width", b - a);
        });
      }
      element.querySelectorAll(".span").forEach((span, i) => {
        const [a, b] = data.spans[i].map((s) => clip(percent(s), 0, 1000) / 10);
        span.style.left = `${a}%`;
        span.style.width = `${b - a}%`;
        span.hidden = b <= a;
      });
      ticks();
      show();
    }

    function ticks() {
      const [from, to] = [seconds(view.from), seconds(view.to)];
      // One unit for the whole axis, as `draw.time_ticks` has it.
      const [unit, length] = to >= 600 ? ["min", 60] : to >= 1 ? ["s", 1] : to >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
      const raw = (to - from) / length / 6, power = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 2.5, 5, 10].find((s) => s * power >= raw * (1 - 1e-9)) * power;
      const labels = [];
      for (let i = Math.ceil(from / length / step - 1e-9); i * step * length <= to * (1 + 1e-12); i += 1) {
        const share = (i * step * length - from) / (to - from) * 100;
        const side = share < 4 ? "start" : share > 96 ? "end" : "middle";
        const minor = labels.length % 2 ? " minor" : "";
        labels.push(`<span class="${side}${minor}" style="left:${share}%">${Number((i * step).toPrecision(6))} ${unit}</span>`);
      }
      element.querySelector(".axis").innerHTML = labels.join("");
    }

    function nearest(lane, column) {
      let low = 0, high = lane.x.length - 1;
      while (low < high) { const mid = (low + high) >> 1; if (lane.x[mid] < column) low = mid + 1; else high = mid; }
      return low && column - lane.x[low - 1] < lane.x[low] - column ? low - 1 : low;
    }

    function show() {
      const inside = at !== null && at >= view.from && at < view.to;
      cursor.hidden = !inside;
      for (const chip of chips) chip.hidden = !inside;
      if (!inside) return;
      const share = (at + .5 - view.from) / (view.to - view.from);
      const frame = lanes.getBoundingClientRect(), field = fields[0].getBoundingClientRect();
      cursor.style.left = `${field.left - frame.left + share * field.width}px`;
      // Beside the cursor, on the side with more room: nothing may move under the pointer.
      data.lanes.forEach((lane, n) => {
        if (!lane.x.length) return;
        const i = nearest(lane, at);
        const range = lane.low && lane.low[i] !== lane.high[i]
          ? `<i> (${human(lane.low[i], lane.unit)} to ${human(lane.high[i], lane.unit)})</i>` : "";
        chips[n].innerHTML = `<b>${human(lane.mid[i], lane.unit)}</b>${range}`;
        chips[n].style.left = share < .55 ? `${share * 100}%` : "";
        chips[n].style.right = share < .55 ? "" : `${100 - share * 100}%`;
      });
      const half = data.duration / columns;
      const now = seconds(at + .5);
      const near = data.marks.filter(([from, to]) => from - half <= now && now <= to + half)
        .slice(0, 3).map((mark) => `<span>${escape(mark[2])}</span>`);
      output.innerHTML = `<span>At <b>${human(now, "s")}</b></span>`
        + `<span>${escape(data.lanes[focused].label)} ${chips[focused].innerHTML}</span>${near.join("")}`;
    }

    function zoom(factor, center = at ?? (view.from + view.to) / 2) {
      const width = clip((view.to - view.from) * factor, 12, columns);
      const share = (center - view.from) / (view.to - view.from);
      view.from = clip(center - share * width, 0, columns - width);
      view.to = view.from + width;
      draw();
    }
    const actions = { in: () => zoom(.5), out: () => zoom(2), all: () => { view.from = 0; view.to = columns; draw(); } };
    element.querySelectorAll("button").forEach((button) =>
      button.addEventListener("click", actions[button.dataset.do]));

    const columnAt = (event) => {
      const field = fields[0].getBoundingClientRect();
      return view.from + clip((event.clientX - field.left) / field.width, 0, .99999) * (view.to - view.from);
    };
    let dragged = null;
    fields.forEach((field, n) => {
      field.addEventListener("focus", () => { focused = n; });
      field.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "touch") { at = Math.floor(columnAt(event)); show(); return; }
        dragged = columnAt(event);
        field.setPointerCapture(event.pointerId);
      });
      field.addEventListener("pointermove", (event) => {
        if (dragged === null) focused = n;
        at = Math.floor(columnAt(event));
        show();
        chosen.hidden = dragged === null;
        if (dragged === null) return;
        const frame = lanes.getBoundingClientRect(), box = fields[0].getBoundingClientRect();
        const [a, b] = [dragged, columnAt(event)].sort((p, q) => p - q)
          .map((column) => (column - view.from) / (view.to - view.from) * box.width);
        chosen.style.left = `${box.left - frame.left + a}px`;
        chosen.style.width = `${b - a}px`;
      });
      field.addEventListener("pointerup", (event) => {
        const [from, to] = [dragged ?? 0, columnAt(event)].sort((p, q) => p - q);
        const drew = dragged !== null && to - from > (view.to - view.from) / 100;
        dragged = null;
        chosen.hidden = true;
        if (!drew) return;
        const width = Math.max(12, to - from);
        view.from = clip((from + to - width) / 2, 0, columns - width);
        view.to = view.from + width;
        draw();
      });
      field.addEventListener("dblclick", actions.all);
      field.addEventListener("keydown", (event) => {
        const step = Math.max(1, Math.round((view.to - view.from) / 200)) * (event.shiftKey ? 10 : 1);
        const moves = { ArrowLeft: () => (at ?? view.from) - step, ArrowRight: () => (at ?? view.from) + step,
          Home: () => view.from, End: () => view.to - 1 };
        const zooms = { "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, Escape: actions.all };
        if (moves[event.key]) {
          at = Math.floor(clip(moves[event.key](), 0, columns - 1));
          const width = view.to - view.from;
          if (at < view.from || at >= view.to) {
            view.from = clip(at - width / 2, 0, columns - width);
            view.to = view.from + width;
            draw();
          } else show();
        } else if (zooms[event.key]) zooms[event.key]();
        else return;
        event.preventDefault();
      });
      field.tabIndex = 0;
      field.setAttribute("role", "group");
      field.setAttribute("aria-label", `${field.parentElement.querySelector(".name").firstChild.textContent.trim()}: arrow keys read values, plus and minus zoom, 0 shows the whole run`);
    });
  }

  const charts = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll(".timeline").forEach((element) => timeline(element, charts[element.dataset.chart]));
})();
