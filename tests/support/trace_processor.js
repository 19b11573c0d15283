// Perfetto's trace processor as its page runs it in a worker: requests from stdin, replies to stdout.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const read = (name) => fs.readFileSync(path.join(process.argv[2], name));

const worker = {
  console: new console.Console(process.stderr),
  location: { href: "http://localhost/" },
  performance,
  TextDecoder,
  URL,
  WorkerGlobalScope: Object,
  XMLHttpRequest: class {
    open(method, name) {
      this.response = read(name);
    }
    send() {}
  },
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(read("engine_bundle.js").toString(), worker);

setImmediate(() => {
  // It is ready once its promises are kept.
  const port = {
    postMessage(reply) {
      for (let done = 0; done < reply.length; ) done += fs.writeSync(1, reply, done);
    },
  };
  worker.onmessage({ data: port });
  const bytes = vm.runInContext("Uint8Array", worker);
  process.stdin.on("data", (data) => port.onmessage({ data: bytes.from(data) }));
});
