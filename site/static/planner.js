// The planner as a form: searches all layouts, as course/planning.py does, by the formulas that
// site/translate.py has made of course/plan.py. Its whole state is the address's fragment, as in
// planner.html#qwen3-30b-a3b,8,h100,21d: anyone who gets the address sees the same plan.
"use strict";

// Layers of the first and last stage, in equal shares; -1 where a stage has none.
function layers_of_stages(model, pp) {
  return [Math.ceil(model.layers / pp), Math.floor(model.layers / pp) || -1];
}

function powers(most) {
  const found = [];
  for (let power = 1; power <= most; power *= 2) found.push(power);
  return found;
}

const dividing = (whole, parts) => parts.filter((part) => whole % part === 0);

// Every layout of these GPUs that breaks no rule, in the order in which Python has them.
function all_layouts(model, job, cluster) {
  const n = cluster.gpus;
  const tps = dividing(model.heads, powers(Math.min(2 * cluster.gpu.domain, 16, n)));
  const pps = dividing(n, range(1, Math.min(model.layers, n, 64) + 1));
  const cps = powers(Math.min(8, Math.max(Math.floor(job.sequence / 4096), 1)));
  const eps = dividing(Math.max(model.experts, 1), powers(Math.min(64, n)));
  const found = [];
  const add = (layout) => {
    if (!Object.values(broken_rules(model, job, layout)).some(Boolean)) found.push(layout);
  };
  for (const tp of tps)
    for (const pp of pps)
      for (const cp of cps) {
        const dp = n / (tp * pp * cp);
        if (!Number.isInteger(dp)) continue;
        for (const ep of eps)
          for (const micro_batch of powers(8))
            for (const chunks of pp > 1 ? [1, 2, 4, 8] : [1])
              for (const zero of pp > 1 ? [0, 1] : [0, 1, 3])
                for (const recompute of [0, 1, 2])
                  add({ dp, tp, pp, cp, ep, micro_batch, chunks, zero, recompute });
      }
  return found;
}

function evaluate(model, job, layout, cluster) {
  const bytes = sum(Object.values(memory(model, job, layout)));
  const time = sum(Object.values(seconds(model, job, layout, cluster.gpu)));
  const limit = room(cluster.gpu);
  return { layout, bytes, seconds: time, fits: bytes <= HEADROOM * limit, tight: bytes <= limit };
}

// The fastest layouts that fit, of each mesh one.
function best(planned, count = 5) {
  const found = new Map();
  const order = planned.filter((one) => one.fits).sort((a, b) => a.seconds - b.seconds);
  for (const one of order) {
    const { tp, pp, cp, ep, zero } = one.layout;
    const mesh = [tp, pp, cp, ep, zero === 3].join();
    if (!found.has(mesh) && found.size < count) found.set(mesh, one);
  }
  return [...found.values()];
}

const least = (all, key) => all.reduce((so_far, one) => (key(one) < key(so_far) ? one : so_far));
const most = (parts) => Object.keys(parts).reduce((a, b) => (parts[b] > parts[a] ? b : a));
const whole = (x) => Math.round(x).toLocaleString("en-US");
const in_tenths = (x) => x.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

// One line for each alternative that is not the choice: does not fit, or how much slower.
function why_not(model, job, planned, cluster, first) {
  const lines = [];
  for (const name of Object.keys(alternatives(first.layout, cluster))) {
    const meant = (one) => alternatives(one.layout, cluster)[name];
    const among = planned.filter(meant);
    if (!among.length || meant(first)) continue;
    const fitting = among.filter((one) => one.fits);
    if (fitting.length) {
      const one = least(fitting, (candidate) => candidate.seconds);
      const there = seconds(model, job, first.layout, cluster.gpu);
      const more = seconds(model, job, one.layout, cluster.gpu);
      for (const part of Object.keys(more)) more[part] -= there[part];
      const part = most(more);
      const slower = `${(one.seconds / first.seconds).toFixed(2)} x as long`;
      const over = link(part, one.layout, cluster);
      lines.push(`${name}: ${slower}, ${part} + ${more[part].toFixed(2)} s${over}`);
    } else {
      const one = least(among, (candidate) => candidate.bytes);
      const parts = memory(model, job, one.layout);
      const limit = in_tenths((HEADROOM * room(cluster.gpu)) / GiB);
      const needs = `needs ${in_tenths(one.bytes / GiB)} GiB of ${limit}`;
      const part = most(parts);
      lines.push(`${name}: does not fit, ${needs} (${whole(parts[part] / GiB)} of ${part})`);
    }
  }
  return lines;
}

// All that the page shows: the choice, the next best, why not the others; or what is wrong.
function plan(model, job, cluster) {
  const layouts = all_layouts(model, job, cluster);
  let planned = layouts.map((layout) => evaluate(model, job, layout, cluster));
  const headroom = planned.some((one) => one.fits);
  if (!headroom) planned = planned.map((one) => ({ ...one, fits: one.tight }));
  const [first, ...others] = best(planned);
  const why = first ? why_not(model, job, planned, cluster, first) : [];
  return { count: layouts.length, headroom, first, others, why };
}

// The form

const DEFAULTS = { days: "", tokens: "", price: "", sequence: "4096", batch: "", lora: "" };
const CHOICES = { optimizer: "adam", compute: "bf16", schedule: "1f1b" };
const SCHEDULES = ["1f1b", "gpipe", "zb-h1"];
// How each number is written in the fragment: before and after its value.
const AROUND = { days: ["", "d"], tokens: ["tokens", ""], price: ["price", ""] };
Object.assign(AROUND, { sequence: ["s", ""], batch: ["b", ""], lora: ["lora", ""] });

function fragment_of(fields) {
  const said = [fields.model, fields.gpus, fields.gpu];
  for (const [name, usual] of Object.entries({ ...DEFAULTS, ...CHOICES })) {
    const [before, after] = AROUND[name] ?? ["", ""];
    if (fields[name] !== usual) said.push(before + fields[name] + after);
  }
  return [...said, ...(fields.offload ? ["offload"] : [])].join(",");
}

// What a fragment says; what it does not say, or says wrongly, is as usual.
function fields_of(fragment) {
  const [model, gpus, gpu, ...words] = decodeURIComponent(fragment).split(",");
  const fields = { model: "qwen3-30b-a3b", gpus: "8", gpu: "h100", ...DEFAULTS, ...CHOICES, offload: false };
  if (model in MODELS) fields.model = model;
  if (/^[1-9]\d{0,5}$/.test(gpus)) fields.gpus = gpus;
  if (gpu in GPUS) fields.gpu = gpu;
  for (const word of words) {
    const [, before, number, after] = /^([a-z]*)([\d.]+)(d?)$/.exec(word) ?? [];
    for (const [name, around] of Object.entries(AROUND))
      if (number && around.join() === [before, after].join()) fields[name] = number;
    if (word in OPTIMIZERS) fields.optimizer = word;
    if (word === "fp8") fields.compute = word;
    if (SCHEDULES.includes(word)) fields.schedule = word;
    if (word === "offload") fields.offload = true;
  }
  return fields;
}

function asked(fields) {
  const gpu = { ...GPUS[fields.gpu], name: fields.gpu };
  const cluster = { gpus: Number(fields.gpus), gpu };
  const sequence = Number(fields.sequence);
  const batch = Number(fields.batch) || Math.max(cluster.gpus, Math.floor((4 * 2 ** 20) / sequence));
  const { compute, offload, schedule } = fields;
  const lora = Number(fields.lora);
  const state_bytes = OPTIMIZERS[fields.optimizer];
  const job = Job({ sequence, batch, state_bytes, compute, offload, lora, schedule, reserve: gpu.reserve });
  return [read_config(MODELS[fields.model]), job, cluster];
}

// What would make a model fit that fits nowhere: the first change that suffices.
function cheapest_change(model, job, cluster) {
  const changes = [
    ["an 8-bit Adam", { ...job, state_bytes: 6 }, cluster],
    ["states in the host's memory", { ...job, offload: true }, cluster],
    ["adapters alone (LoRA of rank 16)", { ...job, lora: 16 }, cluster],
  ];
  for (const factor of powers(256).slice(1)) {
    const gpus = cluster.gpus * factor;
    changes.push([`${whole(gpus)} GPUs`, { ...job, batch: Math.max(job.batch, gpus) }, { ...cluster, gpus }]);
  }
  const suffices = ([, changed, on]) =>
    all_layouts(model, changed, on).some((layout) => evaluate(model, changed, layout, on).fits);
  return (changes.find(suffices) ?? ["more than 256 times as many GPUs"])[0];
}

function tag(name, text = "", ...children) {
  const made = document.createElement(name);
  made.append(text, ...children);
  return made;
}

function parts_table(title, parts, unit, digits) {
  const head = tag("thead", "", tag("tr", "", tag("th", title), tag("th", unit), tag("th", "Formula")));
  const body = tag("tbody");
  for (const [name, value] of Object.entries(parts))
    if (value > 0)
      body.append(tag("tr", "", tag("td", name), tag("td", value.toFixed(digits)), tag("td", FORMULAS[name])));
  const box = tag("div", "", tag("table", "", head, body));
  box.className = "table-wrapper planned";
  return box;
}

const items = (lines) => tag("ul", "", ...lines.map((line) => tag("li", line)));

function rates(model, job, cluster, step, fields) {
  const per_gpu = (job.batch * job.sequence) / step / cluster.gpus;
  const peak = job.compute === "fp8" ? cluster.gpu.fp8 : cluster.gpu.bf16;
  const share = (convention) => `${(100 * mfu(model, job.sequence, per_gpu, peak, convention)).toFixed(1)}%`;
  const lines = [`${whole(per_gpu * cluster.gpus)} tokens/s, ${whole(per_gpu)} per GPU`];
  lines.push(
    `MFU ${share("causal")} (half of the attention matrix, no input embedding), ${share("full")} (all ` +
      `of it), ${share("6N")} (6N); of the dense ${job.compute} peak`,
  );
  let days = Number(fields.days);
  const per_day = per_gpu * cluster.gpus * 86400;
  if (days) {
    const tokens = per_day * days;
    const each = tokens / sum(Object.values(parameters(model)));
    lines.push(`${days} days: ${whole(tokens / 1e9)} billion tokens, ${each.toFixed(1)} per parameter`);
  }
  if (Number(fields.tokens)) {
    const needed = (Number(fields.tokens) * 1e9) / per_day;
    days = days || needed;
    lines.push(`${fields.tokens} billion tokens: ${in_tenths(needed)} days`);
  }
  if (Number(fields.price) && days) {
    const cost = whole(fields.price * cluster.gpus * days * 24);
    lines.push(`cost: ${cost} at ${fields.price} per GPU-hour, for ${in_tenths(days)} days`);
  }
  return items(lines);
}

function emitted(model, layout, job) {
  const found = [];
  for (const trainer of Object.keys(WRITERS)) {
    let said;
    try {
      said = settings(trainer, model, layout, job);
    } catch (error) {
      said = error.message;
    }
    found.push(tag("details", "", tag("summary", trainer), tag("pre", said)));
  }
  return found;
}

function shown(fields) {
  const [model, job, cluster] = asked(fields);
  const { count, headroom, first, others, why } = plan(model, job, cluster);
  if (!count) return [tag("p", `No layout divides ${job.batch} sequences over ${cluster.gpus} GPUs.`)];
  if (!first) {
    const change = cheapest_change(model, job, cluster);
    const said = `It does not fit on ${whole(cluster.gpus)} ${cluster.gpu.name}, in any of ${whole(count)} layouts.`;
    return [tag("p", `${said} The cheapest change: ${change}.`)];
  }
  const in_gib = (bytes) => bytes / GiB;
  const bytes = memory(model, job, first.layout);
  const gib = Object.fromEntries(Object.entries(bytes).map(([part, value]) => [part, in_gib(value)]));
  const limit = in_gib(room(cluster.gpu));
  const fills = `a plan may fill ${(HEADROOM * limit).toFixed(1)} (${whole(100 * HEADROOM)}% of ${limit.toFixed(1)})`;
  const next = others.map((one) => {
    const slower = (one.seconds / first.seconds).toFixed(2);
    return `${slower} x as long, ${whole(in_gib(one.bytes))} GiB: ${words(one.layout, job)}`;
  });
  const note = headroom ? "" : " Nothing fits with headroom: the allocator will free its cache and ask again.";
  return [
    tag("p", tag("strong", words(first.layout, job)), ` is the best of ${whole(count)} layouts.${note}`),
    rates(model, job, cluster, first.seconds, fields),
    parts_table(`Memory: ${in_gib(first.bytes).toFixed(1)} GiB; ${fills}`, gib, "GiB", 2),
    parts_table(`A step: ${first.seconds.toFixed(3)} s`, seconds(model, job, first.layout, cluster.gpu), "s", 3),
    tag("h2", "The next best meshes"),
    items(next),
    tag("h2", "Why not"),
    items(why),
    tag("h2", "Settings to paste"),
    ...emitted(model, first.layout, job),
    tag("h2", "What it rests on"),
    tag("p", `Efficiency ${cluster.gpu.efficiency} (${cluster.gpu.fitted}). Not modeled: ${NOT_MODELED.join(" ")}.`),
  ];
}

const form = document.getElementById("planner");

for (const [name, known] of Object.entries({ model: MODELS, gpu: GPUS, optimizer: OPTIMIZERS }))
  form.elements[name].append(...Object.keys(known).map((one) => tag("option", one)));

function show() {
  document.getElementById("plan").replaceChildren(...shown(fields_of(location.hash.slice(1))));
}

function fill() {
  for (const [name, value] of Object.entries(fields_of(location.hash.slice(1)))) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  show();
}

form.addEventListener("change", () => {
  if (!form.reportValidity()) return;
  const fields = {};
  for (const field of form.elements)
    if (field.name) fields[field.name] = field.type === "checkbox" ? field.checked : field.value;
  history.replaceState(null, "", `#${fragment_of(fields)}`);
  show();
});
form.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", fill);
fill();
