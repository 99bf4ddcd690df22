// The page of the schedule explorer: controls, address, picture.
//
//     controls, address <--> state (this file) --> worker.js --> answers --> the page (this file)
//
// Nothing is computed here: a question goes to Python in a worker, one at a time; of those that come meanwhile
// the last is asked next. A question that takes too long ends the worker, and a new one is started.
(() => {
  "use strict";
  const QUIET_MS = 120; // after the last movement of a control
  const ANSWER_MS = 30_000;
  const LINK = 6_000; // characters of a program that a link holds
  const script = document.currentScript.src;
  const at = (id) => document.getElementById(`sx-${id}`);
  const SLIDERS = [
    "ranks", "microbatches", "chunks", "waves", "steps",
    "forward", "backward_input", "backward_weight", "hop", "memory_cap",
  ];

  // ---- Python, in a worker

  let worker, menu, last = 0, asked = null;
  const waiting = new Map(); // kind of question -> the newest of that kind

  function start() {
    worker = new Worker(new URL("worker.js", script), { type: "module" });
    worker.onmessage = ({ data }) => settle(data);
    worker.onerror = (event) => settle({ broken: event.message || "the worker could not be started" });
  }

  // `done` gets the answer, `refused` the error; a newer question of the same kind takes the place of a waiting one.
  function ask(question, done, refused = (error) => say(error.error, true)) {
    waiting.delete(question.ask);
    waiting.set(question.ask, { question: { ...question, id: ++last }, done, refused });
    pump();
  }

  function pump() {
    if (asked || !waiting.size) return;
    const [[kind, first]] = waiting;
    waiting.delete(kind);
    asked = first;
    if (menu) asked.timer = setTimeout(tooLong, ANSWER_MS);
    worker.postMessage(first.question);
  }

  function settle(data) {
    if (data.id !== undefined && data.id !== asked?.question.id) return;
    const { done, refused, timer } = asked ?? {};
    clearTimeout(timer);
    asked = null;
    if (data.broken) fail(data.broken);
    else if (data.refused) refused(data.refused);
    else done(data.answer);
    pump();
  }

  function tooLong() {
    worker.terminate();
    asked = null;
    say(`No answer within ${ANSWER_MS / 1000} s: take fewer ranks or microbatches.`, true);
    dim(true);
    start();
    pump();
  }

  // ---- the state: controls and address

  function read() {
    const state = { schedule: at("schedule").value };
    for (const name of SLIDERS) state[name] = Number(at(name).value);
    if (!state.memory_cap) state.memory_cap = null;
    if (state.schedule === "own") state.program = at("program").value;
    return state;
  }

  function write(state) {
    at("schedule").value = state.schedule;
    for (const name of SLIDERS) at(name).value = state[name] ?? 0;
    at("program").value = state.program ?? "";
    if (at("schedule").selectedIndex < 0) at("schedule").value = menu.start.schedule;
    label();
  }

  function label() {
    const entry = menu && menu.schedules.find(({ name }) => name === at("schedule").value);
    const own = at("schedule").value === "own";
    for (const name of SLIDERS) {
      const value = Number(at(name).value);
      const words = name === "memory_cap" && !value ? "none" : String(value);
      at(`${name}-value`).textContent = words;
      at(name).setAttribute("aria-valuetext", words);
      const unused = ["chunks", "waves", "steps"].includes(name) ? entry && !entry.takes.includes(name) : false;
      at(name).closest(".sx-control").hidden = unused || (own && ["ranks", "microbatches"].includes(name));
    }
    at("own").hidden = !own;
    at("with").textContent = `chunks ${at("chunks").value}, waves ${at("waves").value}, batches in a row ${at("steps").value}, where a schedule takes them`;
    if (entry) at("summary").textContent = entry.summary;
  }

  function address(state) {
    const words = new URLSearchParams();
    for (const [name, value] of Object.entries(state)) {
      if (value === menu.start[name] || value === null) continue;
      if (name === "program" && value.length > LINK) continue;
      words.set(name, value);
    }
    return `#${words.size ? words : "schedule=" + state.schedule}`;
  }

  function fromAddress() {
    const state = { ...menu.start };
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      // What is no setting, or beyond its bounds, is Python's to refuse.
      state[name] = typeof state[name] === "string" || !(name in state) ? value : Number(value);
    }
    return { ...state, memory_cap: state.memory_cap || null };
  }

  // ---- questions

  let timer;

  function changed() {
    label();
    clearTimeout(timer);
    timer = setTimeout(() => refresh(), QUIET_MS);
  }

  function refresh(state = read()) {
    if (!menu) return;
    history.replaceState(null, "", address(state));
    at("compared").hidden = true;
    say(state.schedule === "plan" ? "Searching for 2 s…" : "Computing…");
    dim(true);
    ask({ ask: "answer", request: state }, show, refuse);
  }

  function say(words, bad = false) {
    at("status").textContent = words;
    at("status").classList.toggle("sx-bad", bad);
  }

  function dim(old) {
    at("picture").classList.toggle("sx-old", old);
    at("result").setAttribute("aria-busy", String(old));
  }

  function fail(words) {
    say(`Python did not answer: ${words}. The site is built with it by \`nox -s docs\` where npm is.`);
  }

  function refuse(refused) {
    dim(false);
    say("Refused.", true);
    clear();
    verdict({ valid: false, ...refused });
  }

  function clear() {
    point(null);
    at("drawn").hidden = at("shown").hidden = at("marked").hidden = true;
    for (const id of ["action", "text", "command"]) at(id).textContent = "";
  }

  // ---- answers

  function show(answer) {
    dim(false);
    clear();
    verdict(answer.verdict, answer);
    at("text").textContent = answer.text ?? "";
    if (!answer.svg) {
      say("Proved wrong.", true);
      return;
    }
    at("shown").hidden = false;
    const most = Math.max(...answer.ranks.map(({ peak }) => peak));
    const name = answer.name === "own" ? "your program" : answer.name;
    const words = `${name}: bubble over ideal ${short(answer.figures.bubble_over_ideal)}, peak activations ${short(most)}`;
    say(`${words}, ${answer.verdict.valid ? "proved" : "over the memory cap"}.`, !answer.verdict.valid);
    figures(answer);
    ranks(answer.ranks);
    at("command").textContent = answer.command;
    picture(answer.svg, answer.words);
  }

  function verdict(found, answer = null) {
    const box = at("verdict");
    const first = document.createElement("strong");
    box.hidden = false;
    box.classList.toggle("sx-bad", !found.valid);
    if (found.valid) {
      first.textContent = "Proved: ";
      const cap = at("memory_cap").value > 0 ? ", and within the memory cap" : "";
      box.replaceChildren(first, `every gradient once, no deadlock over any transport${cap}; ${answer.messages} messages.`);
    } else {
      const report = document.createElement("pre");
      report.textContent = found.error;
      report.tabIndex = 0;
      first.textContent = `${found.type}: `;
      box.replaceChildren(first, report);
    }
    at("marked").hidden = !found.svg;
    at("marked").replaceChildren(...(found.svg ? [svg(found.svg)] : []));
    const frame = at("marked"), wrong = frame.querySelector(".wrong, .absent");
    if (wrong) {
      const place = wrong.getBoundingClientRect();
      frame.scrollLeft += place.left + place.width / 2 - frame.getBoundingClientRect().left - frame.clientWidth / 2;
    }
  }

  function svg(text) {
    return document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  }

  const short = (value) => String(Number(value.toPrecision(6)));

  function figures({ figures: own, search }) {
    const rows = Object.entries(own).map(([name, value]) => [name.replaceAll("_", " "), short(value)]);
    if (search) rows.push(["no order is below", short(search.lower_bound)], ["gap to that bound", short(search.gap)]);
    at("figures").replaceChildren(...rows.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
      pair.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return pair;
    }));
  }

  function row(cells, head = false) {
    const line = document.createElement("tr");
    line.append(...cells.map((content, column) => {
      const cell = document.createElement(head && !column ? "th" : "td");
      if (head && !column) cell.scope = "row";
      cell.append(content);
      return cell;
    }));
    return line;
  }

  function ranks(rows) {
    const cap = Number(at("memory_cap").value);
    const most = Math.max(cap, ...rows.map(({ peak }) => peak)) || 1;
    at("memory").tBodies[0].replaceChildren(...rows.map(({ peak, over, outputs, versions, idle }, rank) => {
      const bar = document.createElement("span");
      bar.className = "sx-bar";
      bar.setAttribute("aria-hidden", "true");
      const held = document.createElement("i");
      held.style.width = `${(100 * peak) / most}%`;
      held.classList.toggle("sx-over", over);
      bar.append(held);
      if (cap) bar.append(Object.assign(document.createElement("b"), { style: `left:${(100 * cap) / most}%` }));
      const said = document.createElement("span");
      said.append(bar, `${short(peak)}${over ? " over the cap" : ""}`);
      said.classList.toggle("sx-no", over);
      return row([String(rank), said, String(outputs), String(versions), `${(100 * idle).toFixed(1)} %`], true);
    }));
  }

  function compare(rows) {
    at("compare").disabled = false;
    at("compared").hidden = false;
    say("Compared.");
    rows.sort((a, b) => (a.bubble ?? Infinity) - (b.bubble ?? Infinity));
    at("compared").tBodies[0].replaceChildren(...rows.map((found) => {
      const link = document.createElement("a");
      link.href = address({ ...read(), schedule: found.name, program: "" });
      link.textContent = found.name;
      const cells = found.refused
        ? [link, found.refused, "", "", "", ""]
        : [link, short(found.bubble), short(found.peak), String(found.versions), String(found.messages), found.fits ? "yes" : "no"];
      const line = row(cells, true);
      if (found.refused) {
        line.cells[1].colSpan = 5;
        while (line.cells.length > 2) line.deleteCell(2);
      } else line.cells[5].classList.toggle("sx-no", !found.fits);
      line.classList.toggle("sx-chosen", found.name === at("schedule").value);
      return line;
    }));
  }

  // ---- the picture: pointing at actions, by mouse, touch and keys

  let rows = [], here = null, said = {}, tip = null;

  function picture(text, words) {
    const drawn = svg(text);
    said = words;
    here = tip = null;
    const found = new Map();
    for (const title of drawn.querySelectorAll("rect > title")) {
      const box = title.parentNode;
      box.dataset.action = title.textContent.split(" ")[0];
      box.classList.add("sx-act");
      title.remove(); // the tip says more
      if (!found.has(box.getAttribute("y"))) found.set(box.getAttribute("y"), []);
      found.get(box.getAttribute("y")).push(box);
    }
    rows = [...found.values()];
    at("picture").replaceChildren(drawn);
    zoom();
  }

  function zoom() {
    const drawn = at("picture").querySelector("svg");
    if (drawn) drawn.style.width = `${100 * at("zoom").value}%`;
  }

  function point(box, { follow = false } = {}) {
    if (here) here.classList.remove("sx-here");
    here = box;
    if (tip) tip.remove();
    tip = null;
    if (!box) return;
    box.classList.add("sx-here");
    const words = said[box.dataset.action] ?? box.dataset.action;
    at("action").textContent = words;
    const frame = at("picture");
    const edge = frame.getBoundingClientRect();
    if (follow) {
      const seen = box.getBoundingClientRect();
      if (seen.left < edge.left + 40) frame.scrollLeft -= edge.left + 80 - seen.left;
      if (seen.right > edge.right - 40) frame.scrollLeft += seen.right - edge.right + 80;
    }
    // Beside the picture's scrolled box, which would cut it off.
    const place = box.getBoundingClientRect();
    tip = Object.assign(document.createElement("div"), { className: "sx-tip", textContent: words, ariaHidden: "true" });
    at("frame").append(tip);
    tip.style.left = `${Math.max(0, Math.min(place.left - edge.left, frame.offsetWidth - tip.offsetWidth))}px`;
    tip.style.top = `${place.bottom - edge.top + 6}px`;
  }

  function step(key) {
    if (!rows.length) return;
    const line = Math.max(0, rows.findIndex((each) => each.includes(here)));
    const column = here ? rows[line].indexOf(here) : -1;
    const middle = (box) => Number(box.getAttribute("x")) + Number(box.getAttribute("width")) / 2;
    const nearest = (boxes) => boxes.reduce((a, b) => (Math.abs(middle(a) - middle(here)) <= Math.abs(middle(b) - middle(here)) ? a : b));
    if (!here) return point(rows[0][0], { follow: true });
    const to = {
      ArrowRight: () => rows[line][Math.min(column + 1, rows[line].length - 1)],
      ArrowLeft: () => rows[line][Math.max(column - 1, 0)],
      ArrowDown: () => nearest(rows[Math.min(line + 1, rows.length - 1)]),
      ArrowUp: () => nearest(rows[Math.max(line - 1, 0)]),
      Home: () => rows[line][0],
      End: () => rows[line].at(-1),
    }[key]();
    point(to, { follow: true });
  }

  // ---- what readers do

  function listen() {
    document.querySelector(".sx-form").addEventListener("input", (event) => {
      if (event.target.name) changed();
    });
    document.querySelector(".sx-form").addEventListener("submit", (event) => event.preventDefault());
    addEventListener("hashchange", () => {
      if (!location.hash.includes("=")) return;
      const state = fromAddress();
      write(state);
      refresh(state);
    });
    at("zoom").addEventListener("input", () => {
      point(null);
      zoom();
    });
    const frame = at("picture");
    const over = (event) => event.target.classList?.contains("sx-act") && event.target !== here && point(event.target);
    frame.addEventListener("pointerover", over);
    frame.addEventListener("click", over);
    frame.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null));
    frame.addEventListener("focusout", () => point(null));
    frame.addEventListener("keydown", (event) => {
      if (event.key === "Escape") point(null);
      if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) return;
      event.preventDefault();
      step(event.key);
    });
    at("reset").addEventListener("click", () => {
      write(menu.start);
      refresh();
    });
    at("link").addEventListener("click", link);
    at("save").addEventListener("click", () => ask({ ask: "export", request: read(), form: at("form").value }, save));
    at("compare").addEventListener("click", () => {
      at("compare").disabled = true;
      say("Comparing…");
      ask({ ask: "table", request: { ...read(), program: "" } }, compare);
    });
    at("example").addEventListener("change", ({ target }) => {
      if (!target.value) return;
      at("program").value = menu.examples[target.value];
      changed();
    });
    at("file").addEventListener("change", async ({ target }) => {
      if (!target.files.length) return;
      at("program").value = await target.files[0].text();
      changed();
    });
  }

  async function link() {
    const state = read();
    const whole = !state.program || state.program.length <= LINK;
    try {
      await navigator.clipboard.writeText(location.href);
      say(whole ? "The link is copied." : `The link is copied, without the program: it is longer than ${LINK} characters.`);
    } catch {
      say("The browser keeps the clipboard to itself; the link is this page's address.");
    }
  }

  function save({ file, content }) {
    const target = document.createElement("a");
    target.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
    target.download = file;
    target.click();
    setTimeout(() => URL.revokeObjectURL(target.href), 10_000);
    say(`${file} is saved.`);
  }

  function begin(found) {
    menu = found;
    const groups = new Map(menu.schedules.map(({ group }) => [
      group, Object.assign(document.createElement("optgroup"), { label: group }),
    ]));
    for (const { name, label: words, group } of menu.schedules) groups.get(group).append(new Option(words, name));
    at("schedule").replaceChildren(...groups.values());
    at("schedule").value = menu.start.schedule;
    at("example").append(...Object.keys(menu.examples).map((name) => new Option(name, name)));
    const state = location.hash.includes("=") ? fromAddress() : menu.start;
    write(state);
    refresh(state);
  }

  listen();
  label();
  if (location.protocol === "file:") {
    // Browsers start no worker there; what the site's search has in its place runs no modules.
    say("Opened as a file this page cannot run Python: serve the site's folder, `python -m http.server -d site`.");
  } else {
    start();
    ask({ ask: "menu" }, begin);
  }
})();
