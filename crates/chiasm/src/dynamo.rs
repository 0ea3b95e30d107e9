//! Dynamo's workers as workers of a frontend. They are discovered in etcd or a folder, and removed
//! once they are not registered and can't be connected to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{LargestItem, TensorFormat};
use chiasm_dynamo::{
    Directory, DynamoAddress, DynamoConnector, ModelFiles, ReadyTensors, ResponseListener,
    TensorSetting, Workers,
};
use chiasm_fleet::Fleet;
use chiasm_pipeline::model::ServedModel;
use chiasm_transfer::ShmBlobBudget;
use chiasm_types::{VllmVersion, WorkerId};
use chiasm_vision::AcceptedMedia;
use tokio::sync::watch;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;

/// The vLLM version that Dynamo 1.6.1 requires. Workers don't report theirs.
const DYNAMO_VLLM: VllmVersion = VllmVersion::minor(0, 31);
/// The interval between checks whether workers that are no longer registered are still connected.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The discovery of Dynamo's workers for a fleet. Dropping it ends the discovery.
pub(crate) struct Dynamo {
    _directories: Vec<Directory>,
}

/// Returns `true` if the command line gives Dynamo workers.
pub(crate) fn is_enabled(args: &ServeArgs) -> bool {
    args.engines.upstream.iter().any(|upstream| matches!(upstream, UpstreamArg::Dynamo(_)))
}

/// Starts to discover workers and to add them to the fleet.
pub(crate) fn discover(
    args: &ServeArgs,
    fleet: &Arc<Fleet>,
    model: &Arc<ServedModel>,
) -> Result<Dynamo, CliError> {
    let mut directories = Vec::new();
    let budget = ShmBlobBudget::new((args.engines.dynamo_tensors_gb * (1_u64 << 30) as f64) as u64);
    for upstream in &args.engines.upstream {
        let UpstreamArg::Dynamo(address) = upstream else { continue };
        let tensors = ready_tensors(address, model, &budget)?;
        if tensors.is_some() {
            chiasm_transfer::sweep();
        }
        let directory =
            Directory::follow(address, &args.agents.etcd_tls(), ModelFiles::read(&model.dir));
        let directory =
            directory.map_err(|error| CliError::Usage(format!("--upstream {address}: {error}")))?;
        let reconciler = Reconciler {
            workers: directory.workers(),
            listener: address.response_listener(),
            fleet: fleet.clone(),
            processor: model.processor(),
            tensors,
            largest_item: model.largest_item(AcceptedMedia::ALL),
            takes_images: address.takes_images(),
            tracked: HashMap::new(),
        };
        tokio::spawn(reconciler.run());
        directories.push(directory);
    }
    Ok(Dynamo { _directories: directories })
}

/// Returns the tensor settings for workers on this machine, if the address asks for tensors.
fn ready_tensors(
    address: &DynamoAddress,
    model: &ServedModel,
    budget: &ShmBlobBudget,
) -> Result<Option<ReadyTensors>, CliError> {
    let Some(requested) = address.tensors() else { return Ok(None) };
    let unsupported = |why: &str| CliError::Usage(format!("--upstream {address}: {why}"));
    let Some(vision) = &model.vision else {
        return Err(unsupported("tensors require a model whose images Chiasm processes itself"));
    };
    let format = match requested {
        TensorSetting::Format(format) => format,
        TensorSetting::VersionDefault
            if vision.engine_normalizes_since().is_some_and(|since| since <= DYNAMO_VLLM) =>
        {
            TensorFormat::Raw
        }
        // Workers don't report the element type of their model, and may crash on another type.
        TensorSetting::VersionDefault => {
            return Err(unsupported(
                "vLLM 0.31, the version of Dynamo 1.6.1, expects images of this model as floats \
                 of the worker's element type: give tensors=bfloat16, tensors=float16 or \
                 tensors=float32, or tensors=raw for a newer vLLM that normalises images itself",
            ));
        }
    };
    Ok(Some(ReadyTensors { format, budget: budget.clone() }))
}

/// A task that keeps the fleet's workers equal to those of one namespace.
struct Reconciler {
    workers: watch::Receiver<Workers>,
    listener: ResponseListener,
    fleet: Arc<Fleet>,
    processor: Arc<[u8]>,
    takes_images: bool,
    tensors: Option<ReadyTensors>,
    largest_item: LargestItem,
    /// The workers in the fleet, by their names.
    tracked: HashMap<String, TrackedWorker>,
}

struct TrackedWorker {
    id: WorkerId,
    /// Holds `true` while there is a connection to the worker.
    is_up: watch::Receiver<bool>,
    is_named: bool,
}

impl Reconciler {
    /// Adds named workers, and removes workers that are neither named nor connected. Ends when the
    /// discovery is dropped or the fleet is shut down.
    async fn run(mut self) {
        loop {
            let named: Vec<String> =
                self.workers.borrow_and_update().names().map(str::to_owned).collect();
            self.update_tracked(&named);
            for name in named {
                if !self.tracked.contains_key(&name) && !self.add(name) {
                    return;
                }
            }
            tokio::select! {
                changed = self.workers.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
        }
    }

    /// Updates the named state of all workers. Removes a worker that is neither named nor
    /// connected.
    fn update_tracked(&mut self, named: &[String]) {
        let fleet = &self.fleet;
        self.tracked.retain(|name, worker| {
            let is_named = named.contains(name);
            if std::mem::replace(&mut worker.is_named, is_named) != is_named {
                fleet.set_named(worker.id, is_named);
                if !is_named {
                    tracing::info!(
                        worker = name,
                        "a Dynamo worker is no longer registered; it stays in use while connected"
                    );
                }
            }
            let stays = is_named || *worker.is_up.borrow();
            if !stays {
                tracing::info!(
                    worker = name,
                    "a Dynamo worker is gone: it is neither registered nor connected"
                );
                fleet.remove(worker.id);
            }
            stays
        });
    }

    /// Adds a worker to the fleet. Returns `false` if the fleet is shut down.
    fn add(&mut self, name: String) -> bool {
        let connector = DynamoConnector::new(
            &name,
            self.workers.clone(),
            self.listener.clone(),
            self.processor.clone(),
        )
        .with_images(self.takes_images)
        .with_tensors(self.tensors.clone())
        .with_largest_item(self.largest_item.clone());
        let is_up = connector.is_up();
        let Some(id) = self.fleet.add(Box::new(connector)) else { return false };
        self.tracked.insert(name, TrackedWorker { id, is_up, is_named: true });
        true
    }
}
