//! The plan classes of the fleet's workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use chiasm_backend::{Capabilities, InputForm, PlanClass, Supports};
use chiasm_types::{PlanClassId, WorkerId};

/// A plan class with at least one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentClass {
    /// The number of the class in this fleet.
    pub id: PlanClassId,
    /// The properties that decide how a prompt is planned.
    pub class: PlanClass,
    /// The form of requests that its workers accept.
    pub input: InputForm,
    /// The largest context of its workers, in tokens of prompt and answer together.
    pub max_model_len: usize,
    /// The maximum number of tokens that any of its workers computes in one step.
    pub max_batched_tokens: usize,
    /// The minimum over its workers of the number of tokens that one step can compute.
    pub min_batched_tokens: usize,
}

/// A snapshot of the present classes. Requests are planned for each of them.
pub type PresentClasses = Arc<[PresentClass]>;

/// The classes of a fleet's workers.
#[derive(Default)]
pub(crate) struct Classes {
    workers: BTreeMap<WorkerId, Member>,
    present: PresentClasses,
    /// The optional parts of requests that every worker supports.
    supported_by_all: Supports,
    next_id: u32,
}

struct Member {
    class: PlanClassId,
    supports: Supports,
    max_model_len: usize,
    max_batched_tokens: usize,
}

impl Classes {
    /// Returns the present classes.
    pub(crate) fn present(&self) -> PresentClasses {
        self.present.clone()
    }

    /// Returns the optional parts of requests that every worker supports.
    pub(crate) fn supported_by_all(&self) -> Supports {
        self.supported_by_all
    }

    /// Adds a worker and returns its class.
    pub(crate) fn join(&mut self, id: WorkerId, capabilities: &Capabilities) -> PlanClassId {
        let is_same = |present: &&PresentClass| {
            present.class == capabilities.class && present.input == capabilities.input
        };
        let class = self.present.iter().find(is_same).map(|present| present.id);
        let class = class.unwrap_or_else(|| {
            self.next_id += 1;
            PlanClassId(self.next_id - 1)
        });
        let Capabilities { max_model_len, max_batched_tokens, supports, .. } = *capabilities;
        self.workers.insert(id, Member { class, supports, max_model_len, max_batched_tokens });
        self.update(Some((class, &capabilities.class, capabilities.input)));
        class
    }

    /// Removes a worker, and its class if it was the last worker of the class.
    pub(crate) fn leave(&mut self, id: WorkerId) {
        self.workers.remove(&id);
        self.update(None);
    }

    fn update(&mut self, new: Option<(PlanClassId, &PlanClass, InputForm)>) {
        let members = self.workers.values();
        self.supported_by_all =
            members.fold(Supports::EVERYTHING, |all, member| all.and(member.supports));
        let old = self.present.clone();
        let old = old.iter().map(|present| (present.id, &present.class, present.input));
        let mut classes: Vec<_> = old.chain(new).collect();
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
