// The graphs' code: differences put back together, lines read as nodes, and coloured.

/** The text after a unified difference of the text before. */
function patched(before, difference) {
  const from = before.split("\n"), to = [];
  let at = 0;
  for (const line of difference.split("\n")) {
    const hunk = line.match(/^@@ -(\d+)(?:,(\d+))? /);
    if (hunk) {
      const begin = Number(hunk[1]) - (hunk[2] === "0" ? 0 : 1);
      while (at < begin) to.push(from[at++]);
    } else if (line.startsWith("---") || line.startsWith("+++") || line === "") continue;
    else if (line[0] === "+") to.push(line.slice(1));
    else { if (line[0] === " ") to.push(from[at]); at++; }
  }
  return to.concat(from.slice(at)).join("\n");
}

/** Every graph that the page knows: the final ones, and those before and after each pass that changed one. */
function graphTexts(data) {
  const texts = Object.entries(data.codes).map(([stage, code]) => ({ label: `final: ${stage}`, code: () => code }));
  const now = {};
  data.passes.forEach((run, k) => {
    if (!run.diff) return;
    const before = now[run.stage] ?? (() => data.first[run.stage]);
    let after = null;
    const made = () => (after ??= patched(before(), run.diff));
    const name = `${String(k).padStart(2, "0")} ${run.stage} ${run.name}`;
    texts.push({ label: `${name}: before`, code: before, pass: k }, { label: `${name}: after`, code: made, pass: k });
    now[run.stage] = made;
  });
  return texts;
}

/** Nodes of a graph's code: name, type, operator, the nodes it reads, module and line of the model. */
function nodesOf(code) {
  const nodes = new Map();
  let origin = "", module = "";
  for (const line of code.split("\n")) {
    const remark = line.match(/^ {4}# (.*)$/);
    if (remark) {
      const parts = remark[1].match(/^\[([^\]]*)\] (.*)$/);
      if (parts) { module = parts[1]; origin = parts[2]; }
      continue;
    }
    const call = line.match(/^ {4}(\w+): "([^"]*)" = ([\w.:]+)?(.*)$/);
    if (!call) continue;
    const [, name, type, operator, rest] = call;
    const words = rest.startsWith("[") ? [operator] : rest.replace(/"[^"]*"|'[^']*'/g, "").match(/[A-Za-z_]\w*(?!\w*=)/g);
    const reads = [...new Set(words ?? [])].filter((word) => nodes.has(word));
    nodes.set(name, { name, type, operator: rest.startsWith("[") ? "part" : operator ?? "", reads, module, origin, line: line.trim() });
  }
  return nodes;
}

/** One line of code in coloured parts. */
function coloured(line) {
  const row = document.createElement("span");
  for (const part of line.split(/("[^"]*"|#.*$|\b(?:aten|mindspeed|npu|prims|_c10d_functional)\.[\w.]+)/)) {
    const kind = part[0] === '"' ? "text" : part[0] === "#" ? "remark" : /^\w+\.\w/.test(part) ? "call" : "";
    if (!kind) { row.append(part); continue; }
    const span = document.createElement("span");
    span.className = kind; span.textContent = part;
    row.append(span);
  }
  return row;
}

/** A difference as a block with coloured lines. */
function differenceBlock(text) {
  const wide = document.createElement("div"), block = document.createElement("pre");
  wide.className = "wide"; block.tabIndex = 0;
  const kinds = { "+": "add", "-": "del", "@": "at" };
  for (const line of text.split("\n")) {
    const row = coloured(line || " ");
    row.className = `row ${kinds[line[0]] ?? ""}`;
    block.append(row);
  }
  wide.append(block);
  return wide;
}
