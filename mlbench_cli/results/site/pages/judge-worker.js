// Python and mlbench's judge, started once. An archive stays a Blob, of which Python reads what it needs (WORKERFS).
import { findSigner } from './sshsig.js';

const NOTHING = new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0]); // the smallest WebAssembly module
let started, queue = Promise.resolve();
onmessage = ({ data }) => { queue = queue.then(() => judge(data)); };

const hex = buffer => Array.from(new Uint8Array(buffer), byte => byte.toString(16).padStart(2, '0')).join('');

async function fetchBytes(url, what) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${what} cannot be fetched: HTTP ${answer.status}`);
  return answer;
}

async function start(root, judge, say) {
  say('fetching Python …');
  // Where a policy forbids WebAssembly, loadPyodide never settles: ask first.
  await WebAssembly.compile(NOTHING).catch(error => { throw new Error(`this browser or site forbids WebAssembly: ${error.message}`); });
  const bundle = fetchBytes(new URL(judge.file, root), 'the judge').then(answer => answer.arrayBuffer());
  const signers = fetch(new URL('allowed_signers', root)).then(answer => answer.ok ? answer.text() : '');
  const { loadPyodide } = await import(new URL('pyodide/pyodide.mjs', root).href);
  const python = await loadPyodide({ indexURL: new URL('pyodide/', root).href });
  const data = await bundle;
  if (hex(await crypto.subtle.digest('SHA-256', data)) !== judge.sha256) throw new Error('the judge is not the one that this site names');
  python.FS.mkdirTree('/judge');
  python.FS.mkdirTree('/archive');
  python.unpackArchive(data, 'zip', { extractDir: '/judge' });
  python.runPython('import sys; sys.path.insert(0, "/judge")\nfrom mlbench_cli.results.site.judge_here import check');
  const version = python.runPython('import platform; platform.python_version()');
  return { python, check: python.globals.get('check'), signers: await signers, name: `Python ${version} (Pyodide ${python.version})` };
}

async function judge({ id, url, file, judge, root }) {
  const say = progress => postMessage({ id, progress });
  try {
    const { python, check, signers, name } = await (started ??= start(root, judge, say));
    if (url) {
      say('fetching the archive …');
      file = await (await fetchBytes(url, 'the archive')).blob();
    }
    say('judging …');
    const begun = performance.now();
    python.FS.mount(python.FS.filesystems.WORKERFS, { blobs: [{ name: 'archive.zip', data: file }] }, '/archive');
    let answer;
    try { answer = JSON.parse(check('/archive/archive.zip')); } finally { python.FS.unmount('/archive'); }
    const judged = (performance.now() - begun) / 1000;
    answer.origin = 'nobody has signed it';
    if (answer.signature) {
      try { answer.signer = await findSigner(answer.signature, new TextEncoder().encode(answer.sums), signers); } catch (error) { answer.origin = error.message; }
    }
    postMessage({ id, ...answer, judged, python: name });
  } catch (error) {
    started = undefined;
    postMessage({ id, error: String(error.message ?? error).trim().split('\n').at(-1) });
  }
}
