"use strict";
// Puts what the stream says where it belongs. Every text is a text: nothing here makes markup of a string.

const $ = (id) => document.getElementById(id);
const DASH = "–";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name === "title") node.title = value;
    else node.dataset[name] = value;
  }
  node.append(...children);
  return node;
}

function say(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

function show(id, text, isShown = text !== "") {
  $(id).hidden = !isShown;
  if (isShown) say(id, text);
}

const percent = (share) => `${(100 * Math.max(0, Math.min(1, share || 0))).toFixed(2)}%`;

// --- the snapshot ---------------------------------------------------------------------------

let view = null;

function drawView(found) {
  view = found;
  document.title = `${found.step}/${found.steps} ${found.run} · asyncrl`;
  say("run", found.run);
  say("state", found.state);
  $("state").dataset.tone = found.tone;
  show("health", found.health, found.health === "degraded");
  show("error", found.error);
  say("step", found.step);
  say("steps", found.steps);
  show("phase", found.phase);
  show("resumed", found.resumed);
  show("place", found.place);
  show("time-left", found.time_left ? `about ${found.time_left} left` : "");
  $("accuracy-fact").hidden = found.accuracy === DASH;
  say("accuracy", found.accuracy);
  $("progress").style.width = percent(found.progress);
  drawObstacles(found.obstacles);
  drawBottleneck(found.bottleneck);
  drawPipeline(found.nodes, found.edges, found.bottleneck.node);
  drawAccount(found.account);
  drawLag(found.lag);
  drawFleet(found);
  drawEvents(found.events);
}

function clockOf(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hourCycle: "h23" });
}

function drawObstacles(obstacles) {
  replace($("obstacles"), obstacles.map((one) => el("li", { class: "notice", tone: one.tone },
    el("b", {}, one.service), ` ${one.text} `,
    el("span", { class: "faint" }, [one.count, one.since ? `since ${clockOf(one.since)}` : ""].filter(Boolean).join(", ")))));
}

function drawBottleneck(bottleneck) {
  say("bottleneck-who", bottleneck.title);
  say("bottleneck-why", bottleneck.why);
  say("bottleneck-wait", bottleneck.wait);
  $("bottleneck").dataset.tone = bottleneck.node ? "warn" : "busy";
}

function drawPipeline(nodes, edges, bottleneck) {
  const flows = new Map(edges.map((edge) => [edge.from, edge]));
  const parts = nodes.flatMap((node) => {
    const flow = flows.get(node.id);
    return flow ? [nodeBox(node, node.id === bottleneck), edgeBox(flow)] : [nodeBox(node, node.id === bottleneck)];
  });
  replace($("pipeline"), parts);
}

function nodeBox(node, isBottleneck) {
  const box = el("li", { class: isBottleneck ? "node bottleneck" : "node", node: node.id },
    el("h3", {}, node.title), el("p", { class: "value" }, node.value), el("p", { class: "unit" }, node.unit));
  if (node.fill !== null) {
    const bar = el("div");
    bar.style.width = percent(node.fill);
    box.append(el("div", { class: "fill" }, bar));
  }
  box.append(el("dl", {}, ...node.figures.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  return box;
}

function edgeBox(edge) {
  return el("li", { class: edge.is_moving ? "edge moving" : "edge", edge: `${edge.from}-${edge.to}` },
    el("b", {}, edge.rate), el("div", { class: "line" }), el("span", {}, edge.unit));
}

function drawAccount(account) {
  say("residue", `residue ${account.residue}`);
  $("residue").dataset.tone = account.tone;
  replace($("laws"), account.laws.map((law) => {
    const stack = el("div", { class: "stack" }, ...law.parts.filter((part) => part.share > 0).map((part) => {
      const piece = el("div", { class: part.name, kind: part.kind, title: `${part.name} ${part.count}` });
      piece.style.width = percent(part.share);
      return piece;
    }));
    const parts = law.parts.map((part) => el("span", { kind: part.kind }, `${part.name} `, el("b", {}, part.count)));
    return el("div", { class: "law" }, el("p", { class: "sum" }, el("span", {}, law.name), el("b", {}, law.total)), stack,
      el("p", { class: "parts" }, ...parts));
  }));
}

function drawLag(lag) {
  say("lag-mean", lag.mean);
  say("lag-max", lag.max);
  say("lag-bound", String(lag.max_lag));
  say("lag-masked", lag.masked);
  const highest = Math.max(...lag.bars.map((bar) => bar.share), 1e-9);
  replace($("lag-bars"), lag.bars.map((bar) => {
    const column = el("div");
    column.style.height = percent(0.84 * bar.share / highest);
    const isBound = bar.lag === String(lag.max_lag);
    const label = lag.bars.length <= 12 && bar.share > 0 ? bar.text : "";
    return el("div", { class: isBound ? "bar bound" : "bar", title: `lag ${bar.lag}: ${bar.text}` }, el("span", {}, label), column);
  }));
  const labels = lag.bars.map((bar) => el("span", {}, lag.bars.length <= 16 || bar.lag % 4 === 0 ? bar.lag : ""));
  replace($("lag-axis"), lag.bars.length ? labels : [el("span", {}, "no step is trained yet")]);
}

let isWhole = false; // every service of a large fleet was asked for

function drawFleet(found) {
  replace($("groupings"), found.groupings.map((one) => el("p", { class: "parts" }, el("b", {}, one.title),
    ...one.groups.map((group) => el("span", { class: "state", tone: group.tone }, `${group.name} `, el("b", {}, group.count))))));
  show("all-services", isWhole ? "show the worst only" : `show ${found.num_hidden} more services`, found.num_hidden > 0);
  if (!isWhole || !found.num_hidden) drawServices(found.services);
  else fetch("services").then((answer) => answer.json()).then((services) => isWhole && drawServices(services)).catch(() => {});
}

function drawServices(services) {
  replace($("services"), services.map((one) => el("tr", { class: one.is_replica ? "replica" : "", service: one.name },
    el("td", {}, one.name),
    el("td", {}, el("span", { class: "state", tone: one.tone }, one.state)),
    el("td", { class: "num", label: "version" }, one.version), el("td", { class: "faint wide", label: "" }, one.behind),
    el("td", { class: "num", label: "heartbeat" }, one.heartbeat), el("td", { class: "num", label: "restarts" }, one.restarts))));
}

function drawEvents(events) {
  const rows = events.map((event) => {
    const when = new Date(1000 * event.time);
    const time = el("time", { title: when.toLocaleString() }, clockOf(event.time));
    return el("li", {}, time, el("div", { class: "what" }, el("span", { class: "kind", tone: event.tone }, event.kind),
      el("span", { class: "who" }, event.service), event.text));
  });
  replace($("events"), rows.length ? rows : [el("li", {}, el("time", {}, DASH), "nothing has happened yet")]);
}

/** Put `nodes` in the place of all children, unless they say the same already. */
function replace(parent, nodes) {
  const next = document.createElement(parent.tagName);
  next.append(...nodes);
  if (next.isEqualNode(parent.cloneNode(false))) return;
  const kept = parent.children;
  if (kept.length === next.children.length && [...kept].every((one, at) => one.isEqualNode(next.children[at]))) return;
  parent.replaceChildren(...next.childNodes);
}

// --- curves ---------------------------------------------------------------------------------

const CHARTS = [
  { title: "Reward", series: [["reward", "trained groups", "s-blue"]], dots: ["accuracy", "held-out accuracy", "s-teal"] },
  { title: "KL", series: [["kl", "within the step", "s-violet"], ["rollout_kl", "to the engine", "s-amber"]] },
  { title: "Entropy", series: [["entropy", "entropy", "s-teal"]], floor: 0 },
  { title: "Lag", series: [["lag_max", "largest", "s-amber"], ["lag_mean", "mean", "s-violet"]], floor: 0, hasBound: true },
  { title: "Tokens per second", series: [["rollout_tokens", "replicas", "s-blue"], ["learner_tokens", "learner", "s-amber"]], floor: 0 },
  { title: "Idle share", series: [["rollout_idle", "replicas", "s-blue"], ["learner_idle", "learner", "s-amber"]], floor: 0 },
];
const MARGIN = { left: 44, right: 8, top: 8, bottom: 20 };
const HEIGHT = 150, SMOOTHED_OVER = 20, DRAG_PX = 6;
let curves = null;
let zoom = null; // the first and the last step that are shown, of all charts alike; null for all

function setZoom(range) {
  zoom = range;
  $("unzoom").hidden = range === null;
  if (range) say("unzoom", `steps ${range[0]} to ${range[1]}: show all`);
  for (const chart of charts) chart.draw();
}

/** The places in `curves.steps` that are shown. */
function shown() {
  const places = curves.steps.map((step, at) => at).filter((at) => zoom === null || (curves.steps[at] >= zoom[0] && curves.steps[at] <= zoom[1]));
  return places.length ? places : curves.steps.map((step, at) => at);
}

/** An exponential mean over a twentieth of what is shown, from both ends alike: it lags behind neither way. */
function smoothed(values) {
  const weight = 2 / (1 + Math.max(3, values.length / SMOOTHED_OVER));
  const pass = (list) => {
    let mean = null;
    return list.map((value) => {
      if (typeof value !== "number") return null;
      mean = mean === null ? value : mean + weight * (value - mean);
      return mean;
    });
  };
  const forth = pass(values), back = pass([...values].reverse()).reverse();
  return forth.map((value, at) => (value === null ? null : (value + back[at]) / 2));
}

class Chart {
  constructor(settings) {
    this.settings = settings;
    this.legend = el("p", { class: "legend" });
    this.svg = shape("svg", { role: "img", "aria-label": settings.title });
    this.box = el("section", { class: "card chart", chart: settings.title }, el("h3", {}, settings.title), this.legend, this.svg);
    this.hover = null;
    this.grip = null; // where a drag began: [place, x]
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.hover = null; this.grip = null; this.draw(); });
    this.svg.addEventListener("pointerdown", (event) => {
      this.point(event);
      this.grip = this.hover === null ? null : [this.hover, event.clientX];
      event.preventDefault();
    });
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("dblclick", () => setZoom(null));
  }

  point(event) {
    if (!curves || !curves.steps.length) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    const places = shown();
    const first = curves.steps[places[0]], last = curves.steps[places[places.length - 1]];
    const wanted = first + share * (last - first);
    this.hover = places.reduce((best, at) =>
      Math.abs(curves.steps[at] - wanted) < Math.abs(curves.steps[best] - wanted) ? at : best, places[0]);
    this.draw();
  }

  release(event) {
    const grip = this.grip;
    this.grip = null;
    if (grip === null || this.hover === null || Math.abs(event.clientX - grip[1]) < DRAG_PX) return this.draw();
    const ends = [curves.steps[grip[0]], curves.steps[this.hover]].sort((one, other) => one - other);
    return ends[0] === ends[1] ? this.draw() : setZoom(ends);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!curves || !width) return;
    const { series, dots, floor, hasBound } = this.settings;
    const bound = hasBound && view ? view.lag.max_lag : null;
    const places = shown(), isSmooth = $("smooth").checked;
    const steps = places.map((at) => curves.steps[at]);
    const of = (name) => places.map((at) => curves[name][at]);
    const points = dots ? curves[dots[0]].filter(([step]) => zoom === null || (step >= zoom[0] && step <= zoom[1])) : [];
    const values = [...series.flatMap(([name]) => of(name)), ...points.map((point) => point[1]), bound, floor];
    const all = values.filter((value) => typeof value === "number");
    const isLog = $("log").checked && all.some((value) => value > 0);
    const known = isLog ? all.filter((value) => value > 0) : all;
    const parts = [];
    if (steps.length && known.length) {
      const scale = isLog ? logScaleOf(known, width, steps) : scaleOf(known, width, steps);
      parts.push(...axes(scale, width));
      if (bound !== null && !(isLog && bound <= 0)) parts.push(line("bound", MARGIN.left, scale.y(bound), width - MARGIN.right, scale.y(bound)));
      for (const [name, , style] of series) {
        if (isSmooth) parts.push(...curve(of(name), steps, scale, style, "raw"));
        parts.push(...curve(isSmooth ? smoothed(of(name)) : of(name), steps, scale, style, "curve"));
      }
      for (const [step, value] of points) {
        if (step <= scale.last && !(isLog && value <= 0)) parts.push(shape("circle", { class: `dot ${dots[2]}`, cx: scale.x(step), cy: scale.y(value), r: 2.6 }));
      }
      if (this.hover !== null && this.hover < curves.steps.length) {
        const x = scale.x(curves.steps[this.hover]);
        parts.push(line("cursor", x, MARGIN.top, x, HEIGHT - MARGIN.bottom));
        if (this.grip !== null) {
          const from = scale.x(curves.steps[this.grip[0]]);
          parts.push(shape("rect", { class: "zone", x: Math.min(x, from), y: MARGIN.top, width: Math.abs(x - from), height: HEIGHT - MARGIN.top - MARGIN.bottom }));
        }
      }
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    this.drawLegend();
  }

  drawLegend() {
    const at = this.hover !== null && this.hover < curves.steps.length ? this.hover : curves.steps.length - 1;
    const { series, dots } = this.settings;
    const entries = series.map(([name, title, style]) => [title, style, curves[name][at]]);
    if (dots && curves[dots[0]].length) {
      const before = curves[dots[0]].filter(([step]) => step <= curves.steps[at]);
      entries.push([dots[1], dots[2], before.length ? before[before.length - 1][1] : null]);
    }
    const spans = entries.map(([title, style, value]) => el("span", { class: style }, `${title} `, el("b", {}, figure(value))));
    if (this.hover !== null) spans.unshift(el("em", {}, `step ${curves.steps[at]}`));
    this.legend.replaceChildren(...spans);
  }
}

function shape(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const line = (style, x1, y1, x2, y2) => shape("line", { class: style, x1, y1, x2, y2 });

function logScaleOf(known, width, steps) {
  const low = Math.floor(Math.log10(Math.min(...known)) + 1e-9), high = Math.max(Math.ceil(Math.log10(Math.max(...known)) - 1e-9), low + 1);
  const ends = scaleOf([low, high], width, steps);
  const y = (value) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low);
  const gap = Math.ceil((high - low) / 4);
  const marks = Array.from({ length: Math.floor((high - low) / gap) + 1 }, (_, at) => 10 ** (low + at * gap));
  return { ...ends, marks, y };
}

function scaleOf(known, width, steps) {
  let low = Math.min(...known), high = Math.max(...known);
  if (high - low < 1e-9) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const gap = niceGap((high - low) / 3);
  low = Math.floor(low / gap + 1e-9) * gap;
  high = Math.ceil(high / gap - 1e-9) * gap;
  const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
  const marks = Array.from({ length: Math.round((high - low) / gap) + 1 }, (_, at) => low + at * gap);
  return {
    marks: marks.map((value) => (Math.abs(value) < gap / 1e6 ? 0 : value)), first, last,
    x: (step) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (step - first) / (last - first),
    y: (value) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * (value - low) / (high - low),
  };
}

function niceGap(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((one) => one * power).find((gap) => gap >= rough * 0.999);
}

function axes(scale, width) {
  const parts = [];
  for (const value of scale.marks) {
    const y = scale.y(value);
    parts.push(line("grid", MARGIN.left, y, width - MARGIN.right, y), label(figure(value), MARGIN.left - 6, y + 3.5, "end"));
  }
  parts.push(label(`step ${scale.first}`, MARGIN.left, HEIGHT - 5, "start"), label(String(scale.last), width - MARGIN.right, HEIGHT - 5, "end"));
  return parts;
}

function label(text, x, y, anchor) {
  const node = shape("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}

function curve(values, steps, scale, style, name) {
  let path = "", isDown = false, num = 0, at = 0;
  values.forEach((value, index) => {
    if (typeof value !== "number") { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${scale.x(steps[index]).toFixed(1)} ${scale.y(value).toFixed(1)}`;
    isDown = true; num += 1; at = index;
  });
  if (num === 1) return [shape("circle", { class: `dot ${style}`, cx: scale.x(steps[at]), cy: scale.y(values[at]), r: 2.6 })];
  return path ? [shape("path", { class: `${name} ${style}`, d: path })] : [];
}

function figure(value) {
  if (typeof value !== "number") return DASH;
  const size = Math.abs(value);
  if (size >= 10000) return `${+(value / 1000).toPrecision(3)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size > 0 && size < 0.001) return value.toExponential(1).replace("e-", "e−");
  return String(+value.toPrecision(3));
}

const charts = CHARTS.map((settings) => new Chart(settings));

function drawCurves(found) {
  curves = found;
  for (const chart of charts) chart.draw();
}

// --- rollouts -------------------------------------------------------------------------------

function drawRollouts(found) {
  const note = found.note || (found.groups.length ? "" : "no group is stored yet");
  show("rollouts-note", note);
  replace($("rollouts"), found.groups.map(rolloutCard));
}

function rolloutCard(group) {
  const highest = Math.max(...group.rewards.map(Math.abs), 1e-9);
  const spread = el("div", { class: "spread", title: "rewards of the group's answers" }, ...group.rewards.map((reward) => {
    const bar = el("i", { tone: reward > 0 ? "good" : reward < 0 ? "bad" : "none" });
    bar.style.height = percent(Math.abs(reward) / highest);
    return bar;
  }));
  return el("article", { class: "rollout" },
    el("div", { class: "head" }, el("span", {}, `ticket ${group.ticket}`), el("span", {}, `${group.num_answers} answers, mean reward ${group.reward_mean}`)),
    el("pre", { class: "prompt" }, group.prompt), spread, ...group.answers.map(answerBox));
}

function answerBox(answer) {
  return el("div", { class: "answer" },
    el("div", { class: "head" }, el("span", { class: "pill", tone: answer.tone }, `reward ${answer.reward}`),
      el("span", {}, `${answer.num_tokens} tokens · version ${answer.versions} · ${answer.finish}`)),
    el("pre", {}, answer.text));
}

// --- the stream -----------------------------------------------------------------------------

const SILENCE_MS = 8000, ENDING_MS = 20000;
let stream = null, heard = 0, lastData = 0, isOver = false;

function setLink(state, text) {
  $("link").dataset.link = state;
  say("link", text);
}

function connect() {
  if (stream) stream.close();
  heard = Date.now();
  stream = new EventSource("events");
  const on = (name, draw) => stream.addEventListener(name, (event) => {
    heard = lastData = Date.now();
    setLink("live", "live");
    draw(JSON.parse(event.data));
  });
  on("view", drawView);
  on("curves", drawCurves);
  on("rollouts", drawRollouts);
  on("pulse", () => {});
  on("end", end);
  stream.onerror = () => {
    if (isEnding() && Date.now() - lastData > ENDING_MS) end();
    else setLink("lost", isEnding() ? "the run is ending" : "connection lost, trying again");
  };
}

const isEnding = () => view !== null && view.is_leaving;

/** Nothing more comes: the stream has said so, or a run that was ending does not answer any more. */
function end() {
  isOver = true;
  stream.close();
  setLink("over", "the run has ended");
}

$("unzoom").addEventListener("click", () => setZoom(null));
$("all-services").addEventListener("click", () => { isWhole = !isWhole; drawFleet(view); });
for (const id of ["smooth", "log"]) $(id).addEventListener("change", () => charts.forEach((chart) => chart.draw()));
$("charts").append(...charts.map((chart) => chart.box));
new ResizeObserver(() => charts.forEach((chart) => chart.draw())).observe($("charts"));
if (location.search) history.replaceState(null, "", location.pathname); // the token stays out of the address bar
setInterval(() => { if (!isOver && Date.now() - heard > SILENCE_MS) connect(); }, 2000); // a refused stream is not retried by itself
connect();
