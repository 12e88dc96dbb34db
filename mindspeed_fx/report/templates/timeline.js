// The step on a time line: a lane for compute, one for each link, one for what was measured. Kinds differ in pattern, letter and colour.

const KINDS = [["product", "#e69f00", "P", "none", /\b(mm|bmm|addmm|linear|matmul|einsum|convolution|_scaled_mm|grouped_matmul)\b/],
  ["all_gather", "#0072b2", "G", "M0,8L8,0"], ["reduce_scatter", "#cc79a7", "S", "M0,0L8,8"], ["all_reduce", "#d55e00", "R", "M0,4H8"],
  ["all_to_all", "#56b4e9", "A", "M4,0V8"], ["other sent", "#999999", "O", "M0,4H8M4,0V8"], ["kernel", "#009e73", "K", "M4,4h1v1h-1z"],
  ["stands still", "#d55e00", "!", "M0,8L8,0M0,0L8,8"]];
const PRODUCT = 0, FIRST_SENT = 1, OTHER_SENT = 5, KERNEL = 6, STILL = 7;

function kindOf(operator, sent) {
  if (!sent) return KINDS[PRODUCT][4].test(operator) ? PRODUCT : KERNEL;
  const at = KINDS.findIndex(([name]) => operator.includes(name));
  return at < FIRST_SENT ? OTHER_SENT : at;
}

/** Lanes of blocks, forward before backward: { names, lanes: [[{ start, us, kind, words, ... }]], us, exposed }. */
function scheduleOf(data) {
  const lanes = new Map([["compute", []]]), exposed = [];
  let offset = 0;
  const lane = (name) => { if (!lanes.has(name)) lanes.set(name, []); return lanes.get(name); };
  for (const [stage, graph] of Object.entries(data.timeline.graphs)) {
    const bare = new Map(graph.exposed.map(([k, us, why]) => [k, [us, data.names[why]]]));
    let clock = 0;
    data.kernels[stage].forEach(([name, op, module, us], k) => {
      const on = graph.lane ? graph.lane[k] : 0, start = graph.start ? graph.start[k] : clock, operator = data.names[op];
      if (!on && start > clock + 1e-3) lane("compute").push({ start: offset + clock, us: start - clock, kind: STILL, name: "stands still", words: `compute stands still for ${(start - clock).toFixed(1)} us` });
      if (!on) clock = Math.max(clock, start + us);
      const [lost, why] = bare.get(k) ?? [0, ""];
      const block = { start: offset + start, us, kind: kindOf(operator, on > 0), name, lost, why, stage, operator, module: data.names[module],
        words: `${name}: ${operator}${data.names[module] ? ` of ${data.names[module]}` : ""}, ${stage}, ${us.toFixed(1)} us from ${(offset + start).toFixed(1)}${lost ? `; EXPOSED ${lost.toFixed(1)} us` : ""}` };
      lane(graph.lanes[on]).push(block);
      if (lost) exposed.push(block);
    });
    if (graph.us > clock + 1e-3 && graph.lane) lane("compute").push({ start: offset + clock, us: graph.us - clock, kind: STILL, name: "stands still", words: `compute stands still for ${(graph.us - clock).toFixed(1)} us` });
    offset += graph.us;
  }
  let end = offset;
  if (data.timeline.measured.length) for (const [name, side, start, us] of data.timeline.measured) {
    lane("measured").push({ start, us, kind: kindOf(data.names[name], false), name: data.names[name], words: `measured: ${data.names[name]}, ${data.names[side]}, ${us.toFixed(1)} us from ${start.toFixed(1)}` });
    end = Math.max(end, start + us);
  }
  for (const blocks of lanes.values()) blocks.sort((a, b) => a.start - b.start);
  return { names: [...lanes.keys()], lanes: [...lanes.values()], us: end, modelled: offset, exposed: exposed.sort((a, b) => b.lost - a.lost) };
}

/** Blocks between two times, at most one for each few pixels: neighbours that are too small are one. */
function visibleBlocks(blocks, from, to, pixel) {
  const shown = [];
  for (let k = Math.max(0, d3.bisector((b) => b.start).left(blocks, from) - 1); k < blocks.length && blocks[k].start < to; k++) {
    const block = blocks[k], last = shown[shown.length - 1];
    if (block.start + block.us < from) continue;
    if (last && block.us < 2 * pixel && last.end - last.start < 2 * pixel && block.start - last.end < pixel) {
      last.end = block.start + block.us; last.count += 1; last.lost += block.lost ?? 0;
      if (block.us > last.block.us) last.block = block;
    } else shown.push({ block, start: block.start, end: block.start + block.us, count: 1, lost: block.lost ?? 0 });
  }
  return shown;
}

function drawTimeline(data, place) {
  place.replaceChildren();
  const plan = scheduleOf(data), width = widthOf(place), left = 74, row = 34, height = 26 + row * plan.names.length;
  const bar = document.createElement("p"), note = document.createElement("pre"), frame = document.createElement("div");
  frame.tabIndex = 0; frame.id = "lanes"; frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", "Time line: arrows move, + and - zoom, Home shows all, n goes to the next exposed collective");
  note.className = "note"; note.setAttribute("aria-live", "polite");
  place.append(bar, frame, note);
  const svg = canvas(frame, width, height, "Kernels and collectives of the step over time");
  const box = svg.append("defs");
  KINDS.forEach(([, colour, , path], k) => {
    const pattern = box.append("pattern").attr("id", `kind${k}`).attr("width", 8).attr("height", 8).attr("patternUnits", "userSpaceOnUse");
    pattern.append("rect").attr("width", 8).attr("height", 8).attr("fill", colour).attr("fill-opacity", k === STILL ? 0.15 : 0.6);
    if (path !== "none") pattern.append("path").attr("d", path).attr("stroke", "currentColor").attr("stroke-opacity", 0.75).attr("fill", "none");
  });
  box.append("clipPath").attr("id", "inside").append("rect").attr("x", left).attr("width", width - left).attr("height", height);
  plan.names.forEach((name, k) => svg.append("text").attr("x", 0).attr("y", 18 + row * k).text(name.slice(0, 11)));
  const layer = svg.append("g").attr("clip-path", "url(#inside)"), axis = svg.append("g").attr("transform", `translate(0,${height - 22})`);
  const base = d3.scaleLinear([0, plan.us || 1], [left, width - 4]);
  let x = base, chosen = null;
  const render = () => {
    layer.selectAll("*").remove();
    const [from, to] = x.domain(), pixel = (to - from) / (width - left);
    plan.lanes.forEach((blocks, n) => {
      for (const { block, start, end, count, lost } of visibleBlocks(blocks, from, to, pixel)) {
        const at = x(start), wide = Math.max(1, x(end) - at);
        const rect = layer.append("rect").attr("class", "block").attr("x", at).attr("y", 4 + row * n).attr("width", wide).attr("height", row - 10)
          .attr("fill", `url(#kind${block.kind})`).attr("stroke", lost || block === chosen ? "currentColor" : "none").attr("stroke-width", block === chosen ? 3 : 2);
        rect.append("title").text(count > 1 ? `${count} kernels, the longest ${block.words}` : block.words);
        rect.on("click", () => choose(block)).on("mouseenter", () => note.textContent = block.words);
        const words = `${lost ? "! " : ""}${count > 1 ? `${count} ×` : block.name}`;
        const seen = Math.min(at + wide, width) - Math.max(at, left);
        if (seen > 26) layer.append("text").attr("x", Math.max(at, left) + 3).attr("y", 20 + row * n).attr("font-size", 10).attr("pointer-events", "none")
          .text(seen > 7 * words.length ? words : lost ? "!" : KINDS[block.kind][2]);
      }
    });
    axis.call(d3.axisBottom(x).ticks(Math.max(3, Math.floor(width / 110))).tickFormat((t) => (plan.us < 2000 ? `${d3.format(",.4~r")(t)} us` : `${d3.format(",.4~r")(t / 1000)} ms`)));
  };
  const zoom = d3.zoom().scaleExtent([1, Math.max(2, plan.us)]).translateExtent([[left, 0], [width, height]]).extent([[left, 0], [width, height]])
    .on("zoom", (event) => { x = event.transform.rescaleX(base); render(); });
  const choose = (block) => { chosen = block; note.textContent = `${block.words}${block.why ? `\n${block.why}` : ""}`; render(); };
  const show = (block) => {
    const middle = block.start + block.us / 2, scale = Math.min(Math.max(2, plan.us), Math.max(1, plan.us / (6 * Math.max(block.us, plan.us * 1e-6))));
    svg.call(zoom.transform, d3.zoomIdentity.translate((left + width) / 2 - scale * base(middle), 0).scale(scale));
    choose(block);
  };
  let next = -1;
  const step = () => { if (plan.exposed.length) { next = (next + 1) % plan.exposed.length; show(plan.exposed[next]); } };
  const moves = { ArrowLeft: () => svg.call(zoom.translateBy, 60 / d3.zoomTransform(svg.node()).k, 0), ArrowRight: () => svg.call(zoom.translateBy, -60 / d3.zoomTransform(svg.node()).k, 0),
    "+": () => svg.call(zoom.scaleBy, 1.6), "-": () => svg.call(zoom.scaleBy, 1 / 1.6), Home: () => svg.call(zoom.transform, d3.zoomIdentity), n: step };
  frame.onkeydown = (event) => { if (moves[event.key]) { moves[event.key](); event.preventDefault(); } };
  for (const [word, key] of [["zoom in", "+"], ["zoom out", "-"], ["earlier", "ArrowLeft"], ["later", "ArrowRight"], ["whole step", "Home"], ...(plan.exposed.length ? [["next exposed", "n"]] : [])]) {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = word; button.onclick = moves[key]; bar.append(button, " ");
  }
  svg.call(zoom);
  const used = [...new Set(plan.lanes.flat().map((b) => b.kind))].sort((a, b) => a - b), key = d3.select(place).append("p").attr("class", "keys");
  for (const k of used) {
    const item = key.append("span").attr("class", "key");
    item.append("svg").attr("width", 24).attr("height", 14).append("rect").attr("width", 24).attr("height", 14).attr("fill", `url(#kind${k})`);
    item.append("span").text(`${KINDS[k][2]} ${KINDS[k][0]}`);
  }
  const lost = d3.sum(plan.exposed, (b) => b.lost), sent = plan.lanes.flat().filter((b) => b.kind >= FIRST_SENT && b.kind <= OTHER_SENT).length;
  note.textContent = sent ? `${plan.exposed.length} of ${sent} collectives exposed: ${lost.toFixed(1)} of ${plan.modelled.toFixed(1)} us` : `Nothing is sent: ${plan.modelled.toFixed(1)} us of compute, modelled`;
  if (plan.exposed.length) {
    const wide = plainTable(["exposed us", "takes us", "collective", "graph", "module", "why"], plan.exposed.map((b) => [b.lost.toFixed(1), b.us.toFixed(1), b.name, b.stage, b.module, b.why.replace(/^.*exposed: /, "")]));
    wide.id = "exposed";
    [...wide.querySelectorAll("tbody tr")].forEach((line, k) => {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = "show"; button.setAttribute("aria-label", `show ${plan.exposed[k].name}`); button.onclick = () => { show(plan.exposed[k]); frame.scrollIntoView({ block: "nearest" }); };
      line.cells[0].prepend(button, " ");
    });
    place.append(wide);
  }
  render();
}
