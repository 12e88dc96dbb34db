// The model as a tree: modelled time, kernels and bytes of every module, before and after the passes.

const COLUMNS = [["us", "before"], ["us", "after"], ["us", "backward"], ["kernels", "before"], ["kernels", "after"], ["kernels", "backward"],
  ["MB", "before"], ["MB", "after"], ["MB", "backward"], ["places", "rewritten"], ["places", "left"]];
const STAGE_COLUMN = { captured: 0, forward: 1, inference: 1, backward: 2 };

/** Module path -> its own numbers; with fold, numbers in paths are "*". */
function moduleNumbers(data, fold) {
  const own = new Map();
  const of = (name) => {
    const path = fold ? name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") : name;
    if (!own.has(path)) own.set(path, Array(COLUMNS.length).fill(0));
    return own.get(path);
  };
  for (const [stage, rows] of Object.entries(data.kernels)) {
    const column = STAGE_COLUMN[stage];
    for (const [, , module, us, , moved] of rows) {
      const numbers = of(data.names[module]);
      numbers[column] += us; numbers[column + 3] += 1; numbers[column + 6] += moved / 1e6;
    }
  }
  for (const run of data.passes) {
    for (const [, module] of run.sites) of(data.names[module])[9] += 1;
    for (const [, module] of run.skips) of(data.names[module])[10] += 1;
  }
  return own;
}

/** The tree of paths; every node has the sum of what is under it. */
function moduleTree(own) {
  const root = { path: "", label: "(model)", children: new Map(), sum: Array(COLUMNS.length).fill(0) };
  for (const [path, numbers] of own) {
    let here = root;
    const add = (node) => numbers.forEach((n, k) => { node.sum[k] += n; });
    add(root);
    for (const part of path ? path.split(".") : []) {
      if (!here.children.has(part)) here.children.set(part, { path: here.path ? `${here.path}.${part}` : part, label: part, children: new Map(), sum: Array(COLUMNS.length).fill(0) });
      here = here.children.get(part);
      add(here);
    }
  }
  return root;
}

function drawTree(data, place, fold, find) {
  const root = moduleTree(moduleNumbers(data, fold));
  const table = document.createElement("table"), body = document.createElement("tbody");
  const head = table.createTHead(), groups = head.insertRow(), words = head.insertRow();
  const heading = (row, word, span, scope) => {
    const cell = document.createElement("th");
    cell.scope = scope; cell.colSpan = span; cell.textContent = word; row.append(cell);
  };
  heading(groups, "", 1, "col"); heading(words, "module", 1, "col");
  for (const group of new Set(COLUMNS.map((c) => c[0]))) heading(groups, group, COLUMNS.filter((c) => c[0] === group).length, "colgroup");
  for (const [, word] of COLUMNS) heading(words, word, 1, "col");
  const number = (n) => (n ? n.toLocaleString("en", { maximumFractionDigits: 1 }) : "");
  const matches = (node) => node.path.toLowerCase().includes(find) || [...node.children.values()].some(matches);
  const add = (node, depth, after) => {
    const row = document.createElement("tr"), name = row.insertCell();
    name.style.paddingLeft = `${0.6 + depth}rem`;
    const children = [...node.children.values()].filter((c) => !find || matches(c));
    let shown = [];
    if (children.length) {
      const button = document.createElement("button");
      button.type = "button";
      const set = (open) => {
        button.textContent = open ? "−" : "+";
        button.setAttribute("aria-expanded", open);
        button.setAttribute("aria-label", `${open ? "close" : "open"} ${node.path || "model"}`);
      };
      const toggle = (open) => {
        set(open);
        if (!open) { shown.forEach((r) => r.close()); shown = []; return; }
        let last = row;
        shown = children.map((c) => { const made = add(c, depth + 1, last); last = made.last(); return made; });
      };
      button.onclick = () => toggle(button.getAttribute("aria-expanded") !== "true");
      name.append(button);
      set(false);
      queueMicrotask(() => { if (depth < 2 || find) toggle(true); });
    }
    name.append(node.label);
    node.sum.forEach((n) => { const cell = row.insertCell(); cell.className = "n"; cell.textContent = number(n); });
    after ? after.after(row) : body.append(row);
    return { close() { shown.forEach((r) => r.close()); row.remove(); }, last: () => (shown.length ? shown[shown.length - 1].last() : row) };
  };
  add(root, 0, null);
  table.append(body);
  place.replaceChildren(table);
}
