// A browser of a few lines: reads a text, asks, continues an answer that was cut, and prints the texts of the page.
// node run_page.js PAGE URL QUESTION
const [path, url, question] = process.argv.slice(2);
const page = require("fs").readFileSync(path, "utf8");
const elements = {}, requests = [], original = fetch;
const make = () => ({style: {}, classList: {add() {}, remove() {}, toggle() {}}, value: "", textContent: "",
  children: [], addEventListener() {}, append(...all) { this.children.push(...all); }, focus() {}, scrollTo() {},
  replaceChildren(...all) { this.children = all; }, getBoundingClientRect: () => ({bottom: 0})});
globalThis.window = {addEventListener() {}, scrollTo() {}, scrollBy() {}};
globalThis.document = {createElement: make, getElementById: (id) => elements[id] ??= make(),
  querySelectorAll: () => []};
globalThis.location = {hash: ""};
globalThis.history = {pushState() {}};
globalThis.matchMedia = () => ({matches: true});
globalThis.fetch = (path, options) => {
  if (options?.body) requests.push(JSON.parse(options.body));
  return original(url + path, options);
};
const run = `(async () => {
  at("text").value = "A boat sails.";
  await readText();
  at("question").value = ${JSON.stringify(question)};
  await ask();
  const {compressed} = turns[0].answers, {note, error, actions} = compressed.nodes;
  const shown = [note, error, ...actions.children].map((node) => node.textContent), first = compressed.text;
  if (shown.includes("Continue")) await generate(compressed);
  return {shown, first, text: compressed.text};
})();`;
require("vm").runInThisContext(page.split("<script>")[1].split("</script>")[0] + run)
  .then((values) => console.log(JSON.stringify({...values, request: requests.pop()})));
