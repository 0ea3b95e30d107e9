//! The counterpart of `python/chiasm_vllm`: attaches the frontend's arena and resolves handles to
//! views of its slots.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_engine::wire::{Value, WireTensor};
use chiasm_transfer::{ArenaReader, LAYOUT_VERSION, OpenError};

use crate::handle::{self, HandleProblem};
use crate::lent_slot::{Alarm, LentSlot};

/// The element types that a handle's tensor may have, by torch's names.
const DTYPES: [&str; 10] = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
];

/// An error of attaching an arena.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    #[error("the arena's name must be a string")]
    Name,
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// The plugin. Clones share their state: the engine's loop attaches, its input thread resolves.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    attached: Arc<Mutex<Option<ArenaReader>>>,
    encoder_cache_tokens: usize,
}

impl Plugin {
    /// Creates the plugin of an engine whose encoder cache holds this number of embeddings.
    pub(crate) fn new(encoder_cache_tokens: usize) -> Self {
        Self { attached: Arc::default(), encoder_cache_tokens }
    }

    /// Opens an arena, which replaces the previous one for new handles. Returns the plugin's
    /// description.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError`] if the arena can't be opened; the previous one then stays.
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

    /// Resolves the handle `map` of a tensor to its slot.
    ///
    /// # Errors
    ///
    /// Returns [`HandleProblem`] if the handle is not valid. If the length of the slot is wrong,
    /// its lease is returned at once.
    pub(crate) fn resolve(
        &self,
        tensor: &WireTensor,
        map: &Value,
        alarm: Option<Alarm>,
    ) -> Result<LentSlot, HandleProblem> {
        let handle = handle::parse(map)?;
        let arena = self.attached().clone().ok_or(HandleProblem::NotAttached)?;
        let view = arena.resolve(&handle)?;
        let dtype = || tensor.dtype.to_string();
        let shape = || tensor.shape.clone();
        let Some(nbytes) = tensor.nbytes().filter(|_| DTYPES.contains(&&*tensor.dtype)) else {
            return Err(HandleProblem::Tensor { dtype: dtype(), shape: shape() });
        };
        if nbytes as u64 != handle.length {
            let length = handle.length;
            return Err(HandleProblem::Length { dtype: dtype(), shape: shape(), length });
        }
        Ok(LentSlot::new(view, handle.offset, alarm))
    }

    /// Locks the arena. A panic never leaves it half-changed, so poisoning is ignored.
    fn attached(&self) -> MutexGuard<'_, Option<ArenaReader>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::tests::map;
    use chiasm_engine::wire::TensorData;
    use chiasm_transfer::{Arena, Handle, HandleError};

    const BYTES: usize = 3 * 1176;

    fn tensor(dtype: &'static str, shape: &[usize], map: &Value) -> WireTensor {
        WireTensor {
            dtype: dtype.into(),
            shape: shape.to_vec(),
            data: TensorData::OutOfBand(map.clone()),
        }
    }

    fn attached() -> (Arena, Plugin) {
        let arena = Arena::create(1 << 20).unwrap();
        let plugin = Plugin::new(7);
        plugin.attach(&Value::from(arena.name())).unwrap();
        (arena, plugin)
    }

    fn lend(arena: &Arena) -> Handle {
        let mut writer = arena.slot(BYTES).unwrap();
        writer.fill(7);
        writer.publish().lend().unwrap().handle
    }

    fn resolve(plugin: &Plugin, handle: &Handle) -> Result<LentSlot, HandleProblem> {
        let map = map(handle);
        plugin.resolve(&tensor("uint8", &[3, 1176], &map), &map, None)
    }

    #[test]
    fn handle_is_resolved_to_a_leased_view() {
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
    fn attaching_replaces_the_arena() {
        let plugin = Plugin::new(7);
        let first = Arena::create(1 << 20).unwrap();
        let second = Arena::create(1 << 20).unwrap();
        assert_eq!(resolve(&plugin, &lend(&first)).unwrap_err(), HandleProblem::NotAttached);
        let answer = plugin.attach(&Value::from(first.name())).unwrap();
        assert_eq!(
            (answer["layout"].as_u64(), answer["pid"].as_u64()),
            (Some(1), Some(std::process::id().into()))
        );
        assert_eq!(answer["plugin"].as_str(), Some(env!("CARGO_PKG_VERSION")));
        assert_eq!(answer["encoder_cache_tokens"].as_u64(), Some(7));
        let view = resolve(&plugin, &lend(&first)).unwrap();

        plugin.attach(&Value::from(second.name())).unwrap();
        let another = HandleProblem::Unresolved(HandleError::Arena);
        assert_eq!(resolve(&plugin, &lend(&first)).unwrap_err(), another);
        assert!(resolve(&plugin, &lend(&second)).is_ok());
        // The view of the first arena is still valid.
        assert_eq!(view.as_ref(), [7; BYTES]);
    }

    #[test]
    fn failed_attach_keeps_the_arena() {
        let (arena, plugin) = attached();
        let gone = Arena::create(1 << 20).unwrap();
        gone.unlink();
        for (name, reason) in [
            (Value::from("../etc/passwd"), "is not the name of an arena"),
            (Value::from(gone.name()), "No such file"),
            (Value::Nil, "must be a string"),
        ] {
            let error = plugin.attach(&name).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(resolve(&plugin, &lend(&arena)).is_ok());
    }

    #[test]
    fn handle_is_resolved_once() {
        let (arena, plugin) = attached();
        let handle = lend(&arena);
        let slot = resolve(&plugin, &handle).unwrap();
        assert_eq!(
            resolve(&plugin, &handle).unwrap_err(),
            HandleProblem::Unresolved(HandleError::Used)
        );
        // The failed attempt does not end the lease of the first view.
        assert_eq!(arena.usage().leases, 1);
        drop(slot);
        assert_eq!(
            resolve(&plugin, &handle).unwrap_err(),
            HandleProblem::Unresolved(HandleError::Used)
        );
        assert_eq!(arena.usage().leases, 0);
        // A new lease in the same entry has another generation.
        let again = lend(&arena);
        assert_eq!((again.lease, again.generation), (handle.lease, handle.generation + 1));
        assert!(resolve(&plugin, &again).is_ok());
    }

    #[test]
    fn handle_that_does_not_fit_its_lease_is_refused() {
        let (arena, plugin) = attached();
        let good = lend(&arena);
        for (handle, reason) in [
            (Handle { arena: good.arena ^ 1, ..good }, HandleError::Arena),
            (Handle { lease: u32::MAX, ..good }, HandleError::Lease),
            (Handle { lease: good.lease + 1, ..good }, HandleError::Ended),
            (Handle { generation: good.generation + 1, ..good }, HandleError::Ended),
        ] {
            assert_eq!(resolve(&plugin, &handle).unwrap_err(), HandleProblem::Unresolved(reason));
        }
        let [moved, shorter] = [lend(&arena), lend(&arena)];
        for handle in [
            Handle { offset: moved.offset + 64, ..moved },
            Handle { length: shorter.length - 1, ..shorter },
        ] {
            assert_eq!(
                resolve(&plugin, &handle).unwrap_err(),
                HandleProblem::Unresolved(HandleError::Range)
            );
        }
        assert_eq!(arena.usage().leases, 1, "the leases of the last two are returned");
        assert!(resolve(&plugin, &good).is_ok());
    }

    #[test]
    fn slot_length_must_equal_the_tensors() {
        let (arena, plugin) = attached();
        for (dtype, shape) in
            [("uint8", &[3, 1175][..]), ("float32", &[3, 1176]), ("uint8", &[0]), ("bfloat16", &[])]
        {
            let map = map(&lend(&arena));
            let refused = plugin.resolve(&tensor(dtype, shape, &map), &map, None).unwrap_err();
            assert!(matches!(refused, HandleProblem::Length { .. }), "{refused}");
        }
        for (dtype, shape) in
            [("|u1", &[3, 1176][..]), ("float8", &[3, 1176]), ("uint8", &[usize::MAX, 2])]
        {
            let map = map(&lend(&arena));
            let refused = plugin.resolve(&tensor(dtype, shape, &map), &map, None).unwrap_err();
            assert!(matches!(refused, HandleProblem::Tensor { .. }), "{refused}");
        }
        assert_eq!(arena.usage().leases, 0, "all leases are returned");
        let map = map(&lend(&arena));
        assert!(plugin.resolve(&tensor("bfloat16", &[3, 588], &map), &map, None).is_ok());
    }
}
