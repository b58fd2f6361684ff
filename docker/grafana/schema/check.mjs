// Checks dashboards against Grafana's own types, made into closed JSON schemas: a field that Grafana does not know is an
// error. Beside the dashboard itself, each panel's options and custom field settings are checked against its plugin's types.
//
//     node check.mjs DASHBOARD.json ...
//
// prints what is wrong, a line each, and exits with 1 if anything is. Needs what package.json names (make check-dashboards).
import { readFileSync } from 'node:fs';
import { Ajv } from 'ajv';
import { createGenerator } from 'ts-json-schema-generator';

const TYPES = new URL('node_modules/@grafana/schema/dist/types/raw/', import.meta.url).pathname;

/** A validator of one type; a function that gives problems. */
function checker(file, type) {
  const generator = createGenerator({ path: `${TYPES}${file}/x/types.gen.d.ts`, type, skipTypeCheck: true });
  const validate = new Ajv({ allErrors: true, strict: false }).compile(generator.createSchema(type));
  return (value) =>
    validate(value) ? [] : validate.errors.map((e) => `${e.instancePath} ${e.message} ${JSON.stringify(e.params)}`);
}

const isDashboard = checker('dashboard', 'Dashboard');
const plugins = Object.fromEntries(
  ['timeseries', 'heatmap', 'stat', 'table'].map((name) => [name, checker(`composable/${name}/panelcfg`, 'Options')]),
);
const custom = Object.fromEntries(
  ['timeseries', 'heatmap', 'table'].map((name) => [name, checker(`composable/${name}/panelcfg`, 'FieldConfig')]),
);

let problems = 0;
for (const path of process.argv.slice(2)) {
  const dashboard = JSON.parse(readFileSync(path, 'utf8'));
  const found = isDashboard(dashboard);
  for (const panel of dashboard.panels.filter((panel) => panel.type !== 'row')) {
    const where = (problem) => `${panel.title}: ${problem}`;
    if (!(panel.type in plugins)) {
      found.push(where(`no plugin of the type ${panel.type} is known here`));
      continue;
    }
    found.push(...plugins[panel.type](panel.options).map(where));
    const settings = panel.fieldConfig.defaults.custom;
    if (settings !== undefined) found.push(...custom[panel.type](settings).map(where));
  }
  for (const problem of found) console.log(`${path}: ${problem}`);
  problems += found.length;
}
process.exit(problems ? 1 : 0);
