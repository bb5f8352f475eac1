// Filters of a task's page, and the search over all results. Without this script every page is complete.
const form = document.getElementById('filters');
if (form) {
  form.hidden = false;
  const rows = [...document.querySelectorAll('table.list tbody tr')];
  const apply = () => {
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    let shown = 0;
    for (const row of rows) {
      const fits = wanted.every(([name, value]) => row.getAttribute(`data-${name}`) === value);
      row.hidden = !fits;
      shown += fits;
    }
    document.getElementById('shown').textContent = shown;
    document.getElementById('nothing').hidden = shown > 0;
  };
  form.addEventListener('input', apply);
  form.addEventListener('reset', () => setTimeout(apply));
  form.addEventListener('submit', event => event.preventDefault());
}

const search = document.getElementById('search');
if (search) {
  search.hidden = false;
  const list = document.getElementById('found');
  let index;
  search.addEventListener('submit', event => event.preventDefault());
  search.addEventListener('input', async () => {
    index ??= fetch('index.json').then(answer => answer.json());
    const { results } = await index;
    const words = search.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.replaceChildren();
    list.hidden = !words.length;
    if (!words.length) return;
    const text = each => [each.task, each.preset, each.method, each.network, each.machine, each.division, each.date, `${each.workers} workers`].join(' ').toLowerCase();
    const found = results.filter(each => words.every(word => text(each).includes(word)));
    for (const each of found.slice(0, 50)) {
      const item = document.createElement('li'), link = document.createElement('a');
      link.href = each.page;
      link.textContent = `${each.task} (${each.preset}), ${each.method}, ${each.workers} × ${each.machine}: ${each.value === null ? 'no value' : `${Number(each.value.toPrecision(3))} ${each.unit}`}, ${each.date}`;
      item.append(link);
      list.append(item);
    }
    const note = document.createElement('li');
    note.textContent = found.length > 50 ? `${found.length - 50} more` : found.length ? '' : 'No result fits.';
    if (note.textContent) list.append(note);
  });
}
