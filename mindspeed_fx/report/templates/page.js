// The page: unpacks the data, shows one view at a time, fills passes when they are opened.

function plainTable(head, rows) {
  const wide = document.createElement("div"), table = document.createElement("table");
  wide.className = "wide";
  const top = table.createTHead().insertRow(), body = table.createTBody();
  for (const word of head) { const cell = document.createElement("th"); cell.scope = "col"; cell.textContent = word; top.append(cell); }
  for (const row of rows) {
    const line = body.insertRow();
    for (const word of row) { const code = document.createElement("code"); code.textContent = word; line.insertCell().append(code); }
  }
  wide.append(table);
  return wide;
}

async function unpacked() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const byId = (id) => document.getElementById(id);

function choices(select, words, chosen = 0) {
  select.replaceChildren(...words.map((word, k) => new Option(word, k)));
  if (words.length) select.value = chosen;
}

function passes(data) {
  for (const box of document.querySelectorAll("details.pass")) {
    const run = data.passes[box.dataset.pass], more = box.querySelector(".more");
    const rows = (list) => list.map((row) => row.map((n) => data.names[n]));
    box.addEventListener("toggle", () => {
      if (!box.open || more.childElementCount) return;
      if (run.sites.length) more.append(plainTable(["operator", "module", "source"], rows(run.sites)));
      if (run.skips.length) {
        const head = document.createElement("p");
        head.textContent = "Near misses";
        more.append(head, plainTable(["reason", "module", "source"], rows(run.skips)));
      }
      if (run.diff) more.append(differenceBlock(run.diff));
    });
  }
  byId("find-pass").addEventListener("input", (event) => {
    const word = event.target.value.toLowerCase();
    for (const box of document.querySelectorAll("details.pass")) {
      const run = data.passes[box.dataset.pass];
      const has = (list) => list.some((row) => row.some((n) => data.names[n].toLowerCase().includes(word)));
      box.hidden = Boolean(word) && !box.textContent.toLowerCase().includes(word) && !has(run.sites) && !has(run.skips) && !run.diff.toLowerCase().includes(word);
    }
  });
}

/** The passes whose difference makes, changes or removes a node, and the line of the graph. */
function passesOf(data, name) {
  const own = new RegExp(`^([+-]) {4}${name.replace(/\W/g, "")}: (.*)$`, "gm"), rows = [];
  data.passes.forEach((run, k) => {
    const lines = [...run.diff.matchAll(own)];
    if (!lines.length) return;
    const what = lines.length > 1 ? "changed" : lines[0][1] === "+" ? "made" : "removed";
    rows.push([`${String(k).padStart(2, "0")} ${run.name}`, run.stage, what, `${name}: ${lines[lines.length - 1][2]}`]);
  });
  return rows;
}

function questions(data, show) {
  for (const button of document.querySelectorAll("[data-go]")) button.onclick = () => show(button.dataset.go);
  const find = byId("find-node"), answer = byId("node-answer");
  if (!find) return;
  find.oninput = () => {
    const name = find.value.trim(), rows = name ? passesOf(data, name) : [];
    answer.replaceChildren(...(rows.length ? [plainTable(["pass", "graph", "what", "line"], rows)] : [name ? `No pass changed ${name}.` : ""]));
  };
}

function model(data) {
  const draw = () => drawTree(data, byId("tree"), byId("fold").checked, byId("find-module").value.toLowerCase());
  byId("fold").onchange = draw; byId("find-module").oninput = draw;
  draw();
}

function roofline(data) {
  const stages = Object.keys(data.kernels), chosen = Math.max(0, stages.indexOf("forward"));
  choices(byId("roof-stage"), stages.map((s) => data.meaning[s]), chosen);
  const draw = () => drawRoofline(data, byId("roofline"), stages[byId("roof-stage").value]);
  byId("roof-stage").onchange = draw;
  draw();
}

function graph(data) {
  const texts = graphTexts(data), at = byId("graph-at"), module = byId("graph-module"), other = byId("graph-other");
  let nodes, paths;
  const draw = () => drawGraph(byId("graph"), byId("graph-node"), nodes, paths[module.value]);
  const read = () => {
    const before = paths?.[module.value];
    nodes = nodesOf(texts[at.value].code());
    paths = modulesIn(nodes);
    const layer = paths.findIndex((p) => /(^|\.)0$/.test(p));
    choices(module, paths.map((p) => p || "(everything)"), paths.includes(before) ? paths.indexOf(before) : Math.max(0, layer));
    other.disabled = texts[at.value].pass === undefined;
    draw();
  };
  choices(at, texts.map((t) => t.label), Math.max(0, texts.findIndex((t) => t.label === "final: forward")));
  at.onchange = read; module.onchange = draw;
  other.onclick = () => { const k = Number(at.value); at.value = texts[k + 1]?.pass === texts[k].pass ? k + 1 : k - 1; read(); };
  read();
}

unpacked().then((data) => {
  const still = (name) => byId(`view-${name}`) && { [name]: [() => {}, true] };
  const views = { ...still("questions"), model: [model, data.roofs], timeline: [(d) => drawTimeline(d, byId("timeline")), Object.keys(data.timeline.graphs).length || data.timeline.measured.length],
    roofline: [roofline, data.roofs], memory: [(d) => drawMemory(d, byId("memory")), data.memory], ...still("plan"), graph: [graph, graphTexts(data).length],
    ...still("passes"), ...still("measured"), ...still("numbers") };
  passes(data);
  for (const view of Object.keys(views)) { const draw = views[view][0]; views[view][0] = () => draw(data); }
  const show = showViews(byId("views"), views, { timeline: "time line" });
  questions(data, (view) => show(views[view]?.[1] ? view : "numbers"));
  document.documentElement.dataset.ready = "yes";
});
