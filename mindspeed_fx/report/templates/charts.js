// Roofline and memory. Colours of Okabe and Ito (2008), told apart by the colour-blind; marks differ in shape too.

const BOUNDS = { matrix: ["#0072b2", d3.symbolCircle], vector: ["#e69f00", d3.symbolSquare], memory: ["#009e73", d3.symbolTriangle],
  launch: ["#999999", d3.symbolCross], network: ["#cc79a7", d3.symbolDiamond], "": ["#999999", d3.symbolWye] };
const short = d3.format(".3~s");

/** As wide as there is room, so that words keep their size on a phone. */
const widthOf = (place) => Math.max(320, Math.min(900, place.clientWidth || 900));

function canvas(place, width, height, label) {
  place.replaceChildren();
  return d3.select(place).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("role", "img").attr("aria-label", label)
    .attr("font-size", 12);
}

/** Operators of one graph: calls, microseconds, FLOP, bytes, and of most of the time what bounds it and where it is from. */
function operatorsOf(data, stage) {
  const rows = new Map();
  const add = (sums, key, us) => sums.set(data.names[key], (sums.get(data.names[key]) ?? 0) + us);
  const most = (sums) => [...sums].sort((a, b) => b[1] - a[1])[0][0];
  for (const [, op, , us, flops, bytes, bound, timed] of data.kernels[stage]) {
    const name = data.names[op].startsWith("fused ") ? "fused pointwise" : data.names[op];
    const row = rows.get(name) ?? { name, calls: 0, us: 0, flops: 0, bytes: 0, bounds: new Map(), timed: new Map() };
    row.calls += 1; row.us += us; row.flops += flops; row.bytes += bytes;
    add(row.bounds, bound, us); add(row.timed, timed, us);
    rows.set(name, row);
  }
  return [...rows.values()].map((r) => ({ ...r, bound: most(r.bounds), timed: most(r.timed) }));
}

function drawRoofline(data, place, stage) {
  const width = widthOf(place), height = 420, left = 60, low = 40;
  const rows = operatorsOf(data, stage).filter((r) => r.flops && r.bytes && r.us);
  const svg = canvas(place, width, height, `Roofline of ${stage} on ${data.roofs.device}`);
  if (!rows.length) { place.textContent = "No operator of this graph has FLOP."; return; }
  const peaks = Object.entries(data.roofs.peaks), top = d3.max([...peaks.map((p) => p[1]), ...rows.map((r) => r.flops / r.us * 1e6)]);
  const x = d3.scaleLog([d3.min(rows, (r) => r.flops / r.bytes) / 2, Math.max(d3.max(rows, (r) => r.flops / r.bytes) * 2, 2 * top / data.roofs.bandwidth)], [left, width - 20]);
  const y = d3.scaleLog([d3.min(rows, (r) => r.flops / r.us * 1e6) / 3, top * 2], [height - low, 10]);
  svg.append("g").attr("transform", `translate(0,${height - low})`).call(d3.axisBottom(x).ticks(6, "~s"));
  svg.append("g").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(6, "~s"));
  svg.append("text").attr("x", width - 20).attr("y", height - 6).attr("text-anchor", "end").text("FLOP for each byte");
  svg.append("text").attr("x", left + 6).attr("y", 16).text("FLOP/s");
  for (const [name, peak] of peaks) {
    const knee = peak / data.roofs.bandwidth, from = x.domain()[0], begin = Math.max(from, y.domain()[0] / data.roofs.bandwidth);
    const points = [[begin, begin * data.roofs.bandwidth], [Math.max(knee, begin), peak], [x.domain()[1], peak]];
    svg.append("path").attr("d", d3.line((p) => x(p[0]), (p) => y(p[1]))(points)).attr("fill", "none").attr("stroke", "currentColor").attr("stroke-dasharray", "5 3");
    svg.append("text").attr("x", width - 24).attr("y", y(peak) - 5).attr("text-anchor", "end").text(`${name}: ${short(peak)}FLOP/s, memory ${short(data.roofs.bandwidth)}B/s`);
  }
  const area = d3.scaleSqrt([0, d3.max(rows, (r) => r.us)], [4, 22]);
  const marks = svg.selectAll("path.mark").data(rows.sort((a, b) => b.us - a.us)).join("path").attr("class", "mark").attr("tabindex", 0)
    .attr("d", (r) => d3.symbol(BOUNDS[r.bound][1], area(r.us) ** 2)()).attr("fill", (r) => BOUNDS[r.bound][0]).attr("fill-opacity", 0.75)
    .attr("transform", (r) => `translate(${x(r.flops / r.bytes)},${y(r.flops / r.us * 1e6)})`);
  const words = (r) => `${r.name}: ${r.calls} calls, ${r.us.toFixed(1)} us, ${short(r.flops)}FLOP, ${short(r.bytes)}B, bound by ${r.bound || "nothing"}${r.timed && `, time from ${r.timed}`}`;
  marks.append("title").text(words);
  const note = d3.select(place).append("p").attr("aria-live", "polite").text("");
  marks.on("focus mouseenter", (_, r) => note.text(words(r)));
  drawKey(place, [...new Set(rows.map((r) => r.bound))]);
}

function drawKey(place, bounds) {
  const key = d3.select(place).append("p");
  for (const bound of bounds) {
    const item = key.append("span").attr("class", "key");
    item.append("svg").attr("width", 14).attr("height", 14).append("path").attr("transform", "translate(7,7)")
      .attr("d", d3.symbol(BOUNDS[bound][1], 80)()).attr("fill", BOUNDS[bound][0]);
    item.append("span").text(bound || "nothing");
  }
}

/** At most so many points of a long curve, each the largest of its part. */
function thinned(values, most) {
  const step = Math.max(1, Math.ceil(values.length / most)), points = [];
  for (let k = 0; k < values.length; k += step) {
    let at = k;
    for (let j = k; j < Math.min(k + step, values.length); j++) if (values[j] > values[at]) at = j;
    points.push([at, values[at]]);
  }
  return points;
}

function drawMemory(data, place) {
  const memory = data.memory, width = widthOf(place), height = 300, left = 50, low = 30, MiB = 2 ** 20;
  const at = memory.bytes.indexOf(d3.max(memory.bytes)), named = (k) => memory.labels[k].map((n) => data.names[n]);
  const svg = canvas(place, width, height, "Memory over the kernels of the step");
  const x = d3.scaleLinear([0, Math.max(1, memory.bytes.length - 1)], [left, width - 20]), y = d3.scaleLinear([0, memory.bytes[at] / MiB], [height - low, 16]);
  svg.append("g").attr("transform", `translate(0,${height - low})`).call(d3.axisBottom(x).ticks(8));
  svg.append("g").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(6, "~s"));
  svg.append("text").attr("x", left + 6).attr("y", 12).text("MiB over kernels; dotted: the backward begins");
  svg.append("path").attr("d", d3.area().x((p) => x(p[0])).y0(y(0)).y1((p) => y(p[1] / MiB)).curve(d3.curveStepAfter)(thinned(memory.bytes, 1500)))
    .attr("fill", "#56b4e9").attr("fill-opacity", 0.6);
  svg.append("line").attr("x1", x(memory.forward)).attr("x2", x(memory.forward)).attr("y1", 16).attr("y2", height - low).attr("stroke", "currentColor").attr("stroke-dasharray", "3 3");
  svg.append("circle").attr("cx", x(at)).attr("cy", y(memory.bytes[at] / MiB)).attr("r", 5).attr("fill", "#d55e00");
  const note = d3.select(place).append("p").attr("aria-live", "polite");
  const tell = (k) => note.text(`kernel ${k}: ${(memory.bytes[k] / MiB).toFixed(2)} MiB during ${named(k)[1]} of ${named(k)[0] || "the model"}`);
  svg.append("rect").attr("x", left).attr("y", 0).attr("width", width - left - 20).attr("height", height - low).attr("fill", "transparent")
    .on("mousemove", (event) => tell(Math.max(0, Math.min(memory.bytes.length - 1, Math.round(x.invert(d3.pointer(event)[0]))))));
  tell(at);
  d3.select(place).append("p").text(`Peak ${(memory.bytes[at] / MiB).toFixed(2)} MiB above parameters, inputs and the optimizer's states, during ${named(at)[1]} of ${named(at)[0] || "the model"}. Modelled by the graphs' sizes. Alive there:`);
  const rows = memory.live.map(([name, op, module, bytes]) => [(bytes / MiB).toFixed(3), name, data.names[op], data.names[module]]);
  if (memory.others[0]) rows.push([(memory.others[1] / MiB).toFixed(3), `${memory.others[0]} smaller ones`, "", ""]);
  place.append(plainTable(["MiB", "result", "operator", "module"], rows));
}
