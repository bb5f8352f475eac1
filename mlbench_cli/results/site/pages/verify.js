// "Verify here": a worker runs mlbench's judge on an archive. Every text goes in by textContent.
const root = document.body.dataset.root;
const LARGEST = 240e6; // bytes; above it, the command line
const PATIENCE = 15; // seconds until a check is called slow
const index = fetch(`${root}index.json`).then(answer => answer.json());
const workers = new Map();
let next = 0;

function make(tag, text, css) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (css) element.className = css;
  return element;
}

function ask(judge, message, progress) {
  if (!workers.has(judge.file)) {
    const worker = new Worker(new URL('judge-worker.js', import.meta.url), { type: 'module' });
    const waiting = new Map();
    worker.onmessage = ({ data }) => {
      const call = waiting.get(data.id);
      if (data.progress) { call?.progress(data.progress); return; }
      waiting.delete(data.id);
      call?.done(data);
    };
    worker.onerror = event => {
      for (const call of waiting.values()) call.done({ error: event.message || 'the worker did not start' });
      workers.delete(judge.file);
    };
    workers.set(judge.file, { worker, waiting });
  }
  const { worker, waiting } = workers.get(judge.file);
  return new Promise(done => {
    const id = next++;
    waiting.set(id, { done, progress });
    worker.postMessage({ id, judge, root: new URL(root || './', location.href).href, ...message });
  });
}

function show(place, answer, wanted) {
  place.replaceChildren();
  if (answer.error) {
    place.append(make('p', `Could not check: ${answer.error}. On the command line: mlbench verify FILE`, 'warn'));
    place.dataset.state = 'error';
    return;
  }
  const wrong = [...answer.problems];
  if (wanted && answer.sha256 !== wanted.sha256) wrong.unshift(`This is not the archive that the page lists: its SHA-256 is ${answer.sha256}.`);
  if (wanted && !wrong.length && Math.abs(answer.seconds - wanted.seconds) > 1e-9 * Math.abs(wanted.seconds)) wrong.unshift(`The page says ${wanted.seconds} s, the archive ${answer.seconds} s.`);
  if (wrong.length) {
    place.append(make('p', 'Refused', 'bad'));
    const list = document.createElement('ul');
    for (const line of wrong.slice(0, 5)) list.append(make('li', line));
    if (wrong.length > 5) list.append(make('li', `and ${wrong.length - 5} more`));
    place.append(list);
    place.dataset.state = 'refused';
    return;
  }
  const proven = !answer.not_derived.length;
  place.append(make('p', proven ? `Derived again from the evidence: ${answer.summary}` : 'Intact, but not everything follows from the evidence', proven ? 'good' : 'warn'));
  for (const line of [...answer.not_derived, ...answer.notes]) place.append(make('p', line, 'quiet'));
  place.append(make('p', answer.signer ? `Signed by ${answer.signer.principal}, ${answer.signer.fingerprint}` : `Origin: ${answer.origin}`, answer.signer ? 'good' : 'quiet'));
  place.append(make('p', `judged in ${answer.judged.toFixed(2)} s; ${answer.python}`, 'quiet'));
  place.dataset.state = proven ? 'verified' : 'unproven';
}

async function check(place, request, version, wanted) {
  const line = make('span', 'starting …');
  place.replaceChildren(line);
  delete place.dataset.state;
  const slow = setTimeout(() => place.append(make('p', `This takes more than ${PATIENCE} s: the connection is slow, or WebAssembly in this browser (some run it without a compiler for safety). The command line needs about a second: mlbench verify FILE`, 'warn')), 1000 * PATIENCE);
  let answer;
  try {
    const { judge, judges } = await index;
    answer = await ask(judges[version] ?? judge, request, text => { line.textContent = text; });
  } catch (error) {
    answer = { error: error.message };
  }
  clearTimeout(slow);
  show(place, answer, wanted);
}

for (const box of document.querySelectorAll('.verify')) {
  const place = box.querySelector('.verdict'), button = box.querySelector('button'), file = box.querySelector('input');
  if (button) {
    button.hidden = false;
    button.addEventListener('click', async () => {
      if (Number(box.dataset.bytes) > LARGEST) {
        place.textContent = 'This archive is too large for a browser. On the command line: mlbench verify FILE';
        return;
      }
      button.disabled = true;
      const wanted = { sha256: box.dataset.sha256, seconds: Number(box.dataset.seconds) };
      await check(place, { url: new URL(box.dataset.archive, location.href).href }, box.dataset.judge, wanted);
      button.disabled = false;
    });
  }
  if (file) {
    file.hidden = false;
    file.addEventListener('change', () => file.files[0] && check(place, { file: file.files[0] }));
  }
}

const note = document.getElementById('judge');
if (note) index.then(({ judge }) => { note.textContent = `The judge is mlbench ${judge.mlbench}, ${judge.file}, SHA-256 ${judge.sha256}.`; });
