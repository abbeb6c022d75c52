// Begin a generation, cancel it after three tokens, say so, and stay connected until stdin ends: what frees the slot is
// the call's end, not that of the connection.

import { connect } from "./corun.mjs";

const client = connect(process.argv[2]);
const call = client.Generate({ token_ids: { ids: [5, 6, 7] }, sampling_params: { max_tokens: 400 }, seed: "1" });
let tokens = 0;
call.on("data", (message) => {
  tokens += message.token_ids.length;
  if (tokens >= 3 && process.argv[3] === "cancel") call.cancel();
  if (tokens >= 3) console.log("3 tokens");
});
call.on("error", (error) => console.log(`ended with ${error.code}`));
process.stdin.on("end", () => process.exit(0)).resume();
