// Predict first: what answers a question stays covered until it is answered or given up. Answers
// are kept in this browser, under the lesson's name, and go nowhere else.
"use strict";

const GAVE_UP = ""; // the answer of those who gave up

function kept(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // this browser keeps nothing: answers last as long as the page
  }
}

function keep(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // as above
  }
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function button(text, pressed) {
  const made = element("button", { type: "button" }, text);
  made.addEventListener("click", pressed);
  return made;
}

class Predictions {
  constructor(block) {
    this.block = block;
    this.key = `predictions of ${block.dataset.lesson}`;
    this.answers = kept(this.key, {});
    this.questions = [...block.querySelectorAll(".question")];
    for (const question of this.questions) this.ask(question);
    block.append(this.choices());
    this.show();
  }

  // A field below the question, and a place where it is compared.
  ask(question) {
    const number = question.dataset.question;
    const id = `answer-${number}`;
    const field = element("input", { id, required: "", autocomplete: "off" });
    const giveUp = button("Give up", () => this.settle({ [number]: GAVE_UP }));
    const form = element(
      "form",
      {},
      element("label", { for: id }, "You predict"),
      field,
      element("button", {}, "Compare"),
      giveUp,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.settle({ [number]: field.value.trim() || GAVE_UP });
    });
    question.append(form, element("div", { class: "comparison", "aria-live": "polite" }));
  }

  choices() {
    const rest = () => this.questions.map((question) => [question.dataset.question, GAVE_UP]);
    const all = button("Give all up", () => {
      this.settle({ ...Object.fromEntries(rest()), ...this.answers });
    });
    const anew = button("Forget my answers", () => {
      this.answers = {};
      this.settle({});
    });
    const box = element("input", { type: "checkbox", id: "uncovered" });
    box.checked = kept("uncovered", false);
    box.addEventListener("change", () => {
      keep("uncovered", box.checked);
      uncover();
    });
    const label = element("label", { for: "uncovered" }, box, " never cover anything, on any page (nor in print)");
    return element("p", { class: "choices" }, all, anew, label);
  }

  settle(answers) {
    this.answers = { ...this.answers, ...answers };
    keep(this.key, this.answers);
    this.show();
  }

  show() {
    for (const question of this.questions) {
      const number = question.dataset.question;
      const answer = this.answers[number];
      const settled = answer !== undefined;
      question.classList.toggle("settled", settled);
      question.querySelector("input").value = answer ?? "";
      for (const row of document.querySelectorAll(`tr[data-question="${number}"]`)) {
        row.classList.toggle("open", settled);
        row.cells[1].textContent = settled ? answer || "gave up" : "";
      }
    }
    const open = this.questions.every((question) => question.classList.contains("settled"));
    for (const covered of document.querySelectorAll(".covered")) covered.classList.toggle("open", open);
    for (const question of this.questions) this.compare(question);
  }

  // Next to the question: the rows that answer it, and why.
  compare(question) {
    const place = question.querySelector(".comparison");
    place.replaceChildren();
    if (!question.classList.contains("settled")) return;
    const number = question.dataset.question;
    const rows = document.querySelectorAll(`tr[data-question="${number}"]`);
    if (!rows.length) place.append("No row of the recorded run answers this.");
    else if (!rows[0].closest(".predict")) {
      const table = rows[0].closest("table").cloneNode(true);
      table.tBodies[0].replaceChildren(...[...rows].map((row) => row.cloneNode(true)));
      place.append(element("div", { class: "table-wrapper ledger" }, table));
    }
    const why = reason(Number(number));
    if (why) place.append(element("div", { class: "why" }, ...why.cloneNode(true).childNodes));
  }
}

// What "What you should have seen" says under this number.
function reason(number) {
  for (const list of document.querySelectorAll(".seen > ol")) {
    const item = list.children[number - list.start];
    if (item) return item;
  }
  return null;
}

function uncover() {
  document.documentElement.classList.toggle("uncovered", kept("uncovered", false));
}

// What the theme leaves out for those who do not see the page or use no mouse.
function reachable() {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
  document.querySelector(".sidebar-drawer").ariaLabel = "Contents";
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  if (!document.querySelector("h1")) document.querySelector("article").prepend(element("h1", {}, "Search"));
  for (const cell of document.querySelectorAll("th")) {
    if (!cell.textContent.trim()) cell.replaceWith(element("td", { class: cell.className }));
  }
  for (const box of document.querySelectorAll("pre, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

uncover();
for (const block of document.querySelectorAll(".predict")) new Predictions(block);
reachable();
window.addEventListener("resize", reachable);
