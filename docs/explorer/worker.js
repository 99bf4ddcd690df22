// Python in a worker: the page's questions as JSON in, answers as JSON out.
//
//     explorer.js --> this worker --> Pyodide --> tools/explorer/answer.py --> sixfold.pipeline
//
// All files come from beside this one; `tools/explorer/build.py` puts them there.

const here = (name) => new URL(name, import.meta.url).href;

async function load() {
  const runtime = await import("./pyodide/pyodide.mjs");
  const [python, files] = await Promise.all([
    runtime.loadPyodide({ indexURL: here("pyodide/") }),
    fetch(here("python.zip")),
  ]);
  if (!files.ok) throw new Error(`python.zip: ${files.status} ${files.statusText}`);
  python.unpackArchive(await files.arrayBuffer(), "zip");
  return python.runPython("from explorer.answer import reply\nreply");
}

const loaded = load();

onmessage = async ({ data }) => {
  try {
    const reply = await loaded;
    postMessage({ id: data.id, ...JSON.parse(reply(JSON.stringify(data))) });
  } catch (error) {
    postMessage({ id: data.id, broken: String(error) });
  }
};
