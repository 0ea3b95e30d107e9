//! The methods of Chiasm: the client of `chiasm serve` on this side, vLLM's input thread on the
//! other.

use std::collections::HashMap;

use bytes::Bytes;
use chiasm_engine::wire::{
    EngineCoreRequest, MmFeature, MmField, MmItem, SamplingParams, TensorData, WireTensor,
};
use chiasm_engine::{ClientOptions, EngineClient, EngineEndpoints, ItemDelivery, SocketDir};
use chiasm_transfer::Arena;
use chiasm_types::{Dtype, Placeholder, TokenId};

use crate::images::{Image, PATCH_BYTES};
use crate::python::{START_TIMEOUT, Script, Scripts};
use crate::{Failure, Handoff, STEP_TIMEOUT, milliseconds, now};

/// The size of the engine's receiver cache in GiB: four rounds of images in shared memory. Later
/// rounds evict earlier ones, so that slots are reused, as they are in a running `chiasm serve`.
const CACHE_GB: &str = "0.25";
/// The size of the engine's receiver cache in bytes.
pub(crate) const CACHE_BYTES: u64 = 1 << 28;
/// The size of the arena: twice the cache, for requests in flight, and because slots of several
/// sizes leave gaps.
const ARENA_BYTES: u64 = 2 * CACHE_BYTES;

const IMAGE_TOKEN: TokenId = TokenId(151_655);
/// The number of placeholder tokens of every image. A real prompt of Qwen2-VL has one token for
/// four patches. The cost of tokens is the same for all methods, including the text without an
/// image.
const IMAGE_TOKENS: usize = 16;

/// A client and its engine.
pub(crate) struct Frontend {
    client: EngineClient,
    arena: Arena,
    /// The engine's process, which ends when this is dropped.
    _engine: Script,
    /// The key and the checksum of the last image in shared memory, by its number of patches.
    cached: HashMap<usize, (String, u32)>,
}

impl Frontend {
    /// Starts an engine that also receives requests from `peer_input`.
    pub(crate) async fn start(
        scripts: &Scripts,
        sockets: &SocketDir,
        peer_input: &str,
    ) -> Result<Self, Failure> {
        let endpoints = EngineEndpoints::local("tcp://127.0.0.1:0", sockets);
        let options = ClientOptions {
            receiver_cache_bytes: Some(CACHE_BYTES),
            ready_timeout: Some(START_TIMEOUT),
            ..ClientOptions::default()
        };
        let pending = EngineClient::bind(endpoints, options).await?;
        let mut engine = scripts
            .start("engine_input.py", &[&pending.endpoints().handshake, peer_input, CACHE_GB])?;
        let client = tokio::select! {
            client = pending.ready() => client?,
            status = engine.exited() => {
                return Err(format!("engine_input.py has ended with {}", status?).into());
            }
        };
        client.attach_arena(ARENA_BYTES, STEP_TIMEOUT).await?;
        let arena = client.arena().ok_or("the engine has no arena")?.clone();
        Ok(Self { client, arena, _engine: engine, cached: HashMap::new() })
    }

    /// Hands over an image in a slot of the arena, and stores its key for
    /// [`cached`](Self::cached).
    pub(crate) async fn shm(&mut self, image: &Image, id: String) -> Result<Handoff, Failure> {
        let mut request = request(&id);
        let start = now();
        let mut slot = self.arena.slot(image.pixels.len())?;
        slot.copy_from_slice(&image.pixels);
        let slot = slot.publish();
        let written = now();
        request.mm_features[0].data = item(image, TensorData::Slot(slot));
        let (end, checksum) =
            self.submit(request, ItemDelivery { shm: 1, ..ItemDelivery::default() }).await?;
        self.cached.insert(image.patches(), (id, image.checksum));
        let write_ms = Some(milliseconds(start, written));
        Ok(Handoff { ms: milliseconds(start, end), write_ms, equal: checksum == image.checksum })
    }

    /// Sends only the key of the last image of this size in shared memory.
    pub(crate) async fn cached(&mut self, image: &Image, id: String) -> Result<Handoff, Failure> {
        let mut request = request(&id);
        let (key, expected) = self.cached.get(&image.patches()).ok_or("no image is cached yet")?;
        request.mm_features[0].mm_hash = Some(key.clone());
        let start = now();
        let (end, checksum) =
            self.submit(request, ItemDelivery { cached: 1, ..ItemDelivery::default() }).await?;
        Ok(Handoff { ms: milliseconds(start, end), write_ms: None, equal: checksum == *expected })
    }

    /// Sends the prompt without an image, which is a part of the cost of every method.
    pub(crate) async fn text(&mut self, id: String) -> Result<Handoff, Failure> {
        let mut request = request(&id);
        request.mm_features.clear();
        let start = now();
        let (end, _) = self.submit(request, ItemDelivery::default()).await?;
        Ok(Handoff { ms: milliseconds(start, end), write_ms: None, equal: true })
    }

    /// Sends the tensor in the message, without a copy in this process.
    pub(crate) async fn inline(&mut self, image: &Image, id: String) -> Result<Handoff, Failure> {
        let mut request = request(&id);
        let start = now();
        request.mm_features[0].data = item(image, TensorData::Bytes(image.pixels.clone()));
        let (end, checksum) =
            self.submit(request, ItemDelivery { inline: 1, ..ItemDelivery::default() }).await?;
        Ok(Handoff {
            ms: milliseconds(start, end),
            write_ms: None,
            equal: checksum == image.checksum,
        })
    }

    /// Returns the time at which the engine had the request's tensor, and the checksum of the
    /// tensor. Without `keep` the engine drops the tensor: freeing the memory of messages is slow,
    /// and would otherwise slow down a later method.
    pub(crate) async fn report(&self, id: &str, keep: bool) -> Result<(i64, u32), Failure> {
        let args = vec![id.into(), keep.into()];
        let report = self.client.utility("handoff_report", args, STEP_TIMEOUT).await?;
        if !keep {
            self.client.forget_media([id]);
        }
        let (end, checksum) =
            report[0].as_i64().zip(report[1].as_u64()).ok_or("an unreadable report")?;
        Ok((end, checksum as u32))
    }

    async fn submit(
        &self,
        request: EngineCoreRequest,
        expected: ItemDelivery,
    ) -> Result<(i64, u32), Failure> {
        let id = request.request_id.clone();
        let mut stream = self.client.submit(request)?;
        if stream.delivered() != expected {
            return Err(format!("unexpected delivery: {:?}", stream.delivered()).into());
        }
        let whole = async {
            while let Some(output) = stream.next().await {
                output?;
            }
            Ok::<_, Failure>(())
        };
        let read = tokio::time::timeout(STEP_TIMEOUT, whole).await;
        read.map_err(|_| "the engine does not answer")??;
        self.report(&id, expected.inline == 0).await
    }
}

/// Reserves and writes a slot of a new arena.
pub(crate) fn first_use(image: &Image) -> Result<Handoff, Failure> {
    let arena = Arena::create(ARENA_BYTES)?;
    let start = now();
    let mut slot = arena.slot(image.pixels.len())?;
    slot.copy_from_slice(&image.pixels);
    let slot = slot.publish();
    let end = now();
    Ok(Handoff {
        ms: milliseconds(start, end),
        write_ms: None,
        equal: crc32fast::hash(&slot) == image.checksum,
    })
}

/// Creates a request with an image that has no tensors yet.
fn request(id: &str) -> EngineCoreRequest {
    let mut prompt = vec![TokenId(1)];
    prompt.resize(1 + IMAGE_TOKENS, IMAGE_TOKEN);
    prompt.push(TokenId(2));
    let feature = MmFeature {
        data: None,
        modality: "image".to_owned(),
        identifier: id.to_owned(),
        position: Placeholder { offset: 1, length: IMAGE_TOKENS, is_embed: None },
        mm_hash: Some(id.to_owned()),
    };
    EngineCoreRequest {
        request_id: id.to_owned(),
        prompt_token_ids: prompt.into(),
        mm_features: vec![feature],
        sampling_params: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
        ..EngineCoreRequest::default()
    }
}

fn item(image: &Image, data: TensorData) -> Option<MmItem> {
    let shape = vec![image.patches(), PATCH_BYTES];
    let pixels = WireTensor { dtype: Dtype::U8.torch_name().into(), shape, data };
    let grid = [1, image.height as i64, image.width as i64].map(i64::to_le_bytes).concat();
    let grid = WireTensor::new(Dtype::I64, vec![3], Bytes::from(grid))?;
    Some(MmItem(vec![
        ("pixel_values".to_owned(), MmField::flat(pixels, image.patches())),
        ("image_grid_thw".to_owned(), MmField::batched(grid, true)),
    ]))
}
