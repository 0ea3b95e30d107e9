//! What `python/chiasm_vllm` is in a vLLM: attaches the frontend's arena and turns handles into
//! views of its slots.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_engine::wire::{Value, WireTensor};
use chiasm_transfer::{ArenaReader, LAYOUT_VERSION, OpenError};

use crate::handle::{self, Refused};
use crate::lent_slot::{Alarm, LentSlot};

/// Element types that a handle's tensor may have, by torch's names.
const DTYPES: [&str; 10] = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
];

/// An arena can't be attached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    #[error("the arena's name must be a text")]
    Name,
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Clones are the same plugin: the engine's loop attaches, its input thread resolves.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    attached: Arc<Mutex<Option<ArenaReader>>>,
    encoder_cache_tokens: usize,
}

impl Plugin {
    /// In an engine whose encoder cache holds so many embeddings.
    pub(crate) fn new(encoder_cache_tokens: usize) -> Self {
        Self { attached: Arc::default(), encoder_cache_tokens }
    }

    /// Opens an arena, which replaces the one before for new handles, and says who we are.
    ///
    /// # Errors
    /// Why it can't be opened; then the one before stays.
    pub(crate) fn attach(&self, name: &Value) -> Result<Value, AttachError> {
        let name = name.as_str().ok_or(AttachError::Name)?;
        let arena = ArenaReader::open(name)?;
        *self.attached() = Some(arena);
        tracing::info!(name, "attached an arena");
        Ok(Value::Map(vec![
            (Value::from("plugin"), Value::from(env!("CARGO_PKG_VERSION"))),
            (Value::from("layout"), Value::from(LAYOUT_VERSION)),
            (Value::from("pid"), Value::from(std::process::id())),
            (Value::from("encoder_cache_tokens"), Value::from(self.encoder_cache_tokens)),
        ]))
    }

    /// The slot that holds a tensor's bytes, for which it has `map` in its place.
    ///
    /// # Errors
    /// What does not fit. A lease whose slot has not the tensor's length is returned at once.
    pub(crate) fn resolve(
        &self,
        tensor: &WireTensor,
        map: &Value,
        alarm: Option<Alarm>,
    ) -> Result<LentSlot, Refused> {
        let handle = handle::parse(map)?;
        let arena = self.attached().clone().ok_or(Refused::NotAttached)?;
        let view = arena.resolve(&handle)?;
        let (dtype, shape) = (|| tensor.dtype.to_string(), || tensor.shape.clone());
        let Some(nbytes) = tensor.nbytes().filter(|_| DTYPES.contains(&&*tensor.dtype)) else {
            return Err(Refused::Tensor { dtype: dtype(), shape: shape() });
        };
        if nbytes as u64 != handle.length {
            return Err(Refused::Length { dtype: dtype(), shape: shape(), length: handle.length });
        }
        Ok(LentSlot::new(view, handle.offset, alarm))
    }

    /// It is never left half-changed, so a panic elsewhere does not make it unusable.
    fn attached(&self) -> MutexGuard<'_, Option<ArenaReader>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::tests::map;
    use chiasm_engine::wire::TensorData;
    use chiasm_transfer::{Arena, BadHandle, Handle};

    const BYTES: usize = 3 * 1176;

    fn tensor(dtype: &'static str, shape: &[usize], map: &Value) -> WireTensor {
        WireTensor {
            dtype: dtype.into(),
            shape: shape.to_vec(),
            data: TensorData::OutOfBand(map.clone()),
        }
    }

    fn attached() -> (Arena, Plugin) {
        let (arena, plugin) = (Arena::create(1 << 20).unwrap(), Plugin::new(7));
        plugin.attach(&Value::from(arena.name())).unwrap();
        (arena, plugin)
    }

    fn lend(arena: &Arena) -> Handle {
        let mut writer = arena.slot(BYTES).unwrap();
        writer.fill(7);
        writer.publish().lend().unwrap().handle
    }

    fn resolve(plugin: &Plugin, handle: &Handle) -> Result<LentSlot, Refused> {
        let map = map(handle);
        plugin.resolve(&tensor("uint8", &[3, 1176], &map), &map, None)
    }

    #[test]
    fn a_handle_becomes_a_view_that_returns_its_lease() {
        let (arena, plugin) = attached();
        let slot = resolve(&plugin, &lend(&arena)).unwrap();
        assert_eq!(slot.as_ref(), [7; BYTES]);
        let clone = slot.clone();
        drop(slot);
        assert_eq!(arena.usage().leases, 1);
        drop(clone);
        assert_eq!((arena.usage().leases, arena.usage().used), (0, 0));
    }

    #[test]
    fn attaching_says_who_we_are_and_replaces_the_arena_before() {
        let plugin = Plugin::new(7);
        let (first, second) = (Arena::create(1 << 20).unwrap(), Arena::create(1 << 20).unwrap());
        assert_eq!(resolve(&plugin, &lend(&first)).unwrap_err(), Refused::NotAttached);
        let answer = plugin.attach(&Value::from(first.name())).unwrap();
        assert_eq!(
            (answer["layout"].as_u64(), answer["pid"].as_u64()),
            (Some(1), Some(std::process::id().into()))
        );
        assert_eq!(answer["plugin"].as_str(), Some(env!("CARGO_PKG_VERSION")));
        assert_eq!(answer["encoder_cache_tokens"].as_u64(), Some(7));
        let view = resolve(&plugin, &lend(&first)).unwrap();

        plugin.attach(&Value::from(second.name())).unwrap();
        let another = Refused::Unresolved(BadHandle::Arena);
        assert_eq!(resolve(&plugin, &lend(&first)).unwrap_err(), another);
        assert!(resolve(&plugin, &lend(&second)).is_ok());
        // The view of the first is still one.
        assert_eq!(view.as_ref(), [7; BYTES]);
    }

    #[test]
    fn what_is_no_arena_is_not_attached_and_the_one_before_stays() {
        let (arena, plugin) = attached();
        let gone = Arena::create(1 << 20).unwrap();
        gone.unlink();
        for (name, reason) in [
            (Value::from("../etc/passwd"), "is not the name of an arena"),
            (Value::from(gone.name()), "No such file"),
            (Value::Nil, "must be a text"),
        ] {
            let error = plugin.attach(&name).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(resolve(&plugin, &lend(&arena)).is_ok());
    }

    #[test]
    fn a_handle_is_good_for_one_tensor() {
        let (arena, plugin) = attached();
        let handle = lend(&arena);
        let slot = resolve(&plugin, &handle).unwrap();
        assert_eq!(resolve(&plugin, &handle).unwrap_err(), Refused::Unresolved(BadHandle::Used));
        // The first view has not lost its lease by that.
        assert_eq!(arena.usage().leases, 1);
        drop(slot);
        assert_eq!(resolve(&plugin, &handle).unwrap_err(), Refused::Unresolved(BadHandle::Used));
        assert_eq!(arena.usage().leases, 0);
        // Lent again, the same entry has another generation.
        let again = lend(&arena);
        assert_eq!((again.lease, again.generation), (handle.lease, handle.generation + 1));
        assert!(resolve(&plugin, &again).is_ok());
    }

    #[test]
    fn handles_that_do_not_fit_their_lease_are_refused() {
        let (arena, plugin) = attached();
        let good = lend(&arena);
        for (handle, reason) in [
            (Handle { arena: good.arena ^ 1, ..good }, BadHandle::Arena),
            (Handle { lease: u32::MAX, ..good }, BadHandle::Lease),
            (Handle { lease: good.lease + 1, ..good }, BadHandle::Ended),
            (Handle { generation: good.generation + 1, ..good }, BadHandle::Ended),
        ] {
            assert_eq!(resolve(&plugin, &handle).unwrap_err(), Refused::Unresolved(reason));
        }
        let [moved, shorter] = [lend(&arena), lend(&arena)];
        for handle in [
            Handle { offset: moved.offset + 64, ..moved },
            Handle { length: shorter.length - 1, ..shorter },
        ] {
            assert_eq!(
                resolve(&plugin, &handle).unwrap_err(),
                Refused::Unresolved(BadHandle::Range)
            );
        }
        assert_eq!(arena.usage().leases, 1, "nobody else would return those of the last two");
        assert!(resolve(&plugin, &good).is_ok());
    }

    #[test]
    fn a_slot_must_be_as_long_as_its_tensor() {
        let (arena, plugin) = attached();
        for (dtype, shape) in
            [("uint8", &[3, 1175][..]), ("float32", &[3, 1176]), ("uint8", &[0]), ("bfloat16", &[])]
        {
            let map = map(&lend(&arena));
            let refused = plugin.resolve(&tensor(dtype, shape, &map), &map, None).unwrap_err();
            assert!(matches!(refused, Refused::Length { .. }), "{refused}");
        }
        for (dtype, shape) in
            [("|u1", &[3, 1176][..]), ("float8", &[3, 1176]), ("uint8", &[usize::MAX, 2])]
        {
            let map = map(&lend(&arena));
            let refused = plugin.resolve(&tensor(dtype, shape, &map), &map, None).unwrap_err();
            assert!(matches!(refused, Refused::Tensor { .. }), "{refused}");
        }
        assert_eq!(arena.usage().leases, 0, "nobody else would return them");
        let map = map(&lend(&arena));
        assert!(plugin.resolve(&tensor("bfloat16", &[3, 588], &map), &map, None).is_ok());
    }
}
