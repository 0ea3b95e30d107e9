//! Simulated engines inside this process, for `demo` and `serve --sim`.

use std::sync::Arc;

use chiasm_backend::ConnectError;
use chiasm_engine::{EngineEndpoints, EngineHost, FormatPolicy, RunningEngine, SocketDir};
use chiasm_pipeline::model::ServedModel;
use chiasm_prompt::Tokenizer;
use chiasm_sim_engine::{EmbeddingFolder, Exit, KvEvents, LoraLimits, Pace, SimConfig, SimEngine};
use chiasm_types::{BlockSize, Dtype, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, ready};

use crate::cli::SimArgs;

/// A host that starts simulated engines with one configuration.
pub(crate) struct SimHost {
    config: SimConfig,
}

impl SimHost {
    pub(crate) fn new(config: SimConfig) -> Self {
        Self { config }
    }
}

/// Returns a simulated engine's settings for a model. The caller sets the handshake address.
///
/// With a `format`, the engine accepts tensors of that format only: otherwise images could be
/// normalised twice without an error.
pub(crate) fn sim_config(
    args: &SimArgs,
    model: Option<&ServedModel>,
    format: Option<FormatPolicy>,
) -> SimConfig {
    let mut config = SimConfig::new("");
    if let Some(version) = &args.sim_vllm_version {
        config.vllm_version.clone_from(version);
    }
    if let Some(format) = format {
        let raw = format.is_raw(&config.vllm_version);
        config.images.dtypes =
            if raw { vec![Dtype::U8] } else { vec![Dtype::F16, Dtype::BF16, Dtype::F32] };
    }
    // clap has checked that the block size is not 0.
    if let Some(block_size) = BlockSize::new(args.sim_block_size) {
        config.block_size = block_size;
    }
    config.plugin = !args.sim_no_plugin;
    config.kv_connector = args.sim_kv_connector;
    let folder = args.sim_embeddings.clone();
    config.embeddings =
        folder.map(|folder| EmbeddingFolder { folder, encode_only: args.sim_encodes });
    config.prompt_lease = args.sim_prompt_lease;
    config.lora = args.sim_lora.then(LoraLimits::default);
    config.kv_events = (!args.sim_no_kv_events)
        .then(|| KvEvents { buffer_steps: args.sim_replay_batches, ..KvEvents::default() });
    config.faults.drop_kv_batches = args.sim_lose_kv_batches.clone();
    config.num_blocks = args.sim_blocks;
    config.max_model_len = args.sim_max_model_len;
    config.max_num_seqs = args.sim_max_num_seqs;
    config.step_log = args.sim_step_log.clone();
    config.request_log = args.sim_request_log.clone();
    config.pace = Pace {
        prefill_tokens_per_s: args.sim_prefill_rate,
        decode_tokens_per_s: args.sim_decode_rate,
        ms_per_image: args.sim_image_ms,
        speedup: args.sim_speedup,
    };
    if let Some(model) = model {
        config.eos = model.tokenizer.eos_token();
        config.vocab_size = model.tokenizer.vocab_size() as u32;
        config.reply = encode_reply(model.tokenizer.clone());
    }
    if let Some(answer) = args.sim_answer.clone() {
        let encode = config.reply;
        config.reply = Arc::new(move |_| encode(&answer));
    }
    config
}

/// Returns a function that encodes replies with the model's tokenizer.
fn encode_reply(tokenizer: Tokenizer) -> chiasm_sim_engine::TextToTokens {
    Arc::new(move |text| tokenizer.encode(text, false).unwrap_or_default())
}

impl EngineHost for SimHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        EngineEndpoints::local("tcp://127.0.0.1:0", sockets)
    }

    fn start<'a>(
        &'a self,
        _worker: WorkerId,
        endpoints: &'a EngineEndpoints,
        _sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        let config = SimConfig { handshake: endpoints.handshake.clone(), ..self.config.clone() };
        let running: Box<dyn RunningEngine> = Box::new(RunningSim(SimEngine::start(config)));
        ready(Ok(running)).boxed()
    }

    fn describe(&self) -> String {
        "starting a simulated engine".to_owned()
    }
}

struct RunningSim(SimEngine);

impl RunningEngine for RunningSim {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            match self.0.done().await {
                Exit::Failed(error) => format!("the simulated engine failed: {error}"),
                Exit::Killed | Exit::Stopped => "the simulated engine was stopped".to_owned(),
            }
        }
        .boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move { drop(self.0.stop().await) }.boxed()
    }

    fn kill(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.kill();
        ready(()).boxed()
    }
}
