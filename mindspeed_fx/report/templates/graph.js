// One module's graph, laid out by dagre, moved and zoomed by d3.

const FAMILIES = [["fused", "#0072b2", /^(mindspeed|npu)/], ["product", "#e69f00", /\b(mm|bmm|addmm|linear|matmul|einsum|convolution|_scaled_mm)\b/],
  ["collective", "#cc79a7", /^(_c10d_functional|c10d)/], ["view", "#bbbbbb", /\b(_unsafe_view|detach|alias|view|reshape|transpose|permute|unsqueeze|squeeze|expand|slice|select|t|part|cat|split|getitem|clone|unflatten|flatten)\b/],
  ["other", "#009e73", /./]];
const MOST = 400;

function familyOf(operator) {
  return FAMILIES.find(([, , pattern]) => pattern.test(operator)) ?? FAMILIES[FAMILIES.length - 1];
}

/** Paths of modules in a graph, and of those around them, in order. */
function modulesIn(nodes) {
  const paths = new Set([""]);
  for (const { module } of nodes.values()) {
    const parts = module.split(".");
    parts.forEach((_, k) => paths.add(parts.slice(0, k + 1).join(".")));
  }
  return [...paths];
}

function drawGraph(place, note, nodes, module) {
  const chosen = [...nodes.values()].filter((n) => !module || n.module === module || n.module.startsWith(`${module}.`));
  const inside = new Set(chosen.map((n) => n.name));
  place.replaceChildren();
  note.textContent = `${chosen.length} nodes of ${module || "the whole graph"}`;
  if (chosen.length > MOST) { note.textContent += `: more than the ${MOST} that can be told apart; choose a module.`; return; }
  const graph = new dagre.graphlib.Graph().setGraph({ nodesep: 14, ranksep: 26 }).setDefaultEdgeLabel(() => ({}));
  const outside = new Map();
  for (const n of chosen) graph.setNode(n.name, { node: n, width: 14 + 7 * Math.max(n.operator.length, n.name.length, 6), height: 34 });
  for (const n of chosen) for (const read of n.reads) {
    if (!inside.has(read)) {
      outside.set(read, nodes.get(read));
      graph.setNode(read, { node: nodes.get(read), outside: true, width: 14 + 7 * read.length, height: 22 });
    }
    graph.setEdge(read, n.name);
  }
  dagre.layout(graph);
  const { width, height } = graph.graph(), svg = d3.select(place).append("svg").attr("role", "group").attr("aria-label", `Graph of ${module || "all modules"}`);
  const layer = svg.append("g"), zoom = d3.zoom().scaleExtent([0.05, 4]).on("zoom", (event) => layer.attr("transform", event.transform));
  const line = d3.line((p) => p.x, (p) => p.y).curve(d3.curveBasis);
  for (const edge of graph.edges()) layer.append("path").attr("d", line(graph.edge(edge).points)).attr("fill", "none").attr("stroke", "currentColor").attr("stroke-opacity", 0.4);
  for (const name of graph.nodes()) {
    const at = graph.node(name), n = at.node, family = familyOf(n.operator);
    const box = layer.append("g").attr("transform", `translate(${at.x - at.width / 2},${at.y - at.height / 2})`).attr("tabindex", 0).attr("class", "node").attr("data-name", name);
    const frame = box.append("rect").attr("width", at.width).attr("height", at.height).attr("rx", 4).attr("fill", at.outside ? "none" : family[1]).attr("fill-opacity", 0.35).attr("stroke", family[1]);
    box.append("text").attr("x", 7).attr("y", 14).attr("font-size", 11).text(at.outside ? name : n.operator);
    if (!at.outside) box.append("text").attr("x", 7).attr("y", 28).attr("font-size", 10).attr("opacity", 0.75).text(`${name} ${n.type}`.slice(0, Math.floor(at.width / 5.2)));
    const tell = () => {
      layer.selectAll("rect.chosen").attr("class", null);
      frame.attr("class", "chosen");
      note.textContent = `${n.line}\n${n.module || "(model)"}\n${n.origin}`;
    };
    box.on("click focus", tell);
  }
  const key = document.createElement("p");
  for (const [word, colour] of FAMILIES) {
    const item = document.createElement("span");
    item.className = "key"; item.innerHTML = `<svg width="12" height="12"><rect width="12" height="12" fill="${colour}" fill-opacity="0.5" stroke="${colour}"/></svg>`;
    item.append(word); key.append(item);
  }
  place.nextElementSibling?.classList.contains("keys") && place.nextElementSibling.remove();
  key.className = "keys"; place.after(key);
  const box = place.getBoundingClientRect(), scale = Math.min(1, Math.max(0.6, Math.min(box.width / (width + 20), box.height / (height + 20))));
  svg.call(zoom).call(zoom.transform, d3.zoomIdentity.translate((box.width - width * scale) / 2, 8).scale(scale));
  place.onkeydown = (event) => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (moves[event.key]) { svg.call(zoom.translateBy, ...moves[event.key]); event.preventDefault(); }
    else if (event.key === "+") svg.call(zoom.scaleBy, 1.3);
    else if (event.key === "-") svg.call(zoom.scaleBy, 1 / 1.3);
  };
}
