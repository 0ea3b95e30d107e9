//! The plan classes that are present in the fleet.

use std::collections::BTreeMap;
use std::sync::Arc;

use chiasm_backend::{Capabilities, InputForm, PlanClass, Supports};
use chiasm_types::{PlanClassId, WorkerId};

/// A plan class that at least one worker is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentClass {
    /// The class's number in this fleet.
    pub id: PlanClassId,
    /// What decides how a prompt is planned.
    pub class: PlanClass,
    /// What its workers are given.
    pub input: InputForm,
    /// The largest context of any of its workers, in tokens of prompt and answer together.
    pub max_model_len: usize,
    /// The most tokens that one step of any of its workers computes.
    pub max_batched_tokens: usize,
    /// The fewest tokens that one step of any of its workers computes.
    pub min_batched_tokens: usize,
}

/// The classes of one moment. Requests are planned for each of them.
pub type PresentClasses = Arc<[PresentClass]>;

/// The classes of a fleet's workers.
#[derive(Default)]
pub(crate) struct Classes {
    workers: BTreeMap<WorkerId, Member>,
    present: PresentClasses,
    /// The optional parts of requests that every worker supports.
    supported_by_all: Supports,
    next: u32,
}

struct Member {
    class: PlanClassId,
    supports: Supports,
    max_model_len: usize,
    max_batched_tokens: usize,
}

impl Classes {
    /// The classes of now.
    pub(crate) fn present(&self) -> PresentClasses {
        self.present.clone()
    }

    /// Returns the optional parts of requests that every worker supports.
    pub(crate) fn supported_by_all(&self) -> Supports {
        self.supported_by_all
    }

    /// Takes note of a worker; its class.
    pub(crate) fn join(&mut self, id: WorkerId, can: &Capabilities) -> PlanClassId {
        let is_of = |known: &&PresentClass| known.class == can.class && known.input == can.input;
        let class = self.present.iter().find(is_of).map(|known| known.id).unwrap_or_else(|| {
            self.next += 1;
            PlanClassId(self.next - 1)
        });
        let Capabilities { max_model_len, max_batched_tokens, supports, .. } = *can;
        self.workers.insert(id, Member { class, supports, max_model_len, max_batched_tokens });
        self.update(Some((class, &can.class, can.input)));
        class
    }

    /// Forgets a worker, and its class with the last worker of it.
    pub(crate) fn leave(&mut self, id: WorkerId) {
        self.workers.remove(&id);
        self.update(None);
    }

    fn update(&mut self, new: Option<(PlanClassId, &PlanClass, InputForm)>) {
        let members = self.workers.values();
        self.supported_by_all =
            members.fold(Supports::EVERYTHING, |all, member| all.and(member.supports));
        let old = self.present.clone();
        let known = old.iter().map(|known| (known.id, &known.class, known.input));
        let mut classes: Vec<_> = known.chain(new).collect();
        classes.sort_by_key(|(id, ..)| *id);
        classes.dedup_by_key(|(id, ..)| *id);
        let present = classes.into_iter().filter_map(|(id, class, input)| {
            let members = || self.workers.values().filter(|member| member.class == id);
            Some(PresentClass {
                id,
                class: class.clone(),
                input,
                max_model_len: members().map(|member| member.max_model_len).max()?,
                max_batched_tokens: members().map(|member| member.max_batched_tokens).max()?,
                min_batched_tokens: members().map(|member| member.max_batched_tokens).min()?,
            })
        });
        self.present = present.collect();
    }
}
