//! The workers of Dynamo as workers of a frontend: found in etcd, and let go when nothing names
//! them and they can't be connected to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{LargestItem, TensorFormat};
use chiasm_dynamo::{
    CallHome, Directory, DynamoAddress, DynamoConnector, ModelFiles, ReadyTensors, TensorsFor,
    Workers,
};
use chiasm_fleet::Fleet;
use chiasm_pipeline::model::ServedModel;
use chiasm_transfer::ParcelRoom;
use chiasm_types::{VllmVersion, WorkerId};
use chiasm_vision::TakenKinds;
use tokio::sync::watch;

use crate::cli::{ServeArgs, UpstreamArg};
use crate::error::CliError;

/// The vLLM that Dynamo 1.6.1 asks for: workers don't say which one they have.
const VLLM_OF_DYNAMO: VllmVersion = VllmVersion::minor(0, 31);
/// How often it is looked whether a worker that is named no more has gone.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Finds workers and adds them to a fleet for as long as this lives.
pub(crate) struct Dynamo {
    _directories: Vec<Directory>,
}

/// Whether workers of Dynamo are to be found.
pub(crate) fn is_asked_for(args: &ServeArgs) -> bool {
    args.engines.upstream.iter().any(|upstream| matches!(upstream, UpstreamArg::Dynamo(_)))
}

/// Begins to look for workers.
pub(crate) fn find(
    args: &ServeArgs,
    fleet: &Arc<Fleet>,
    model: &Arc<ServedModel>,
) -> Result<Dynamo, CliError> {
    let mut directories = Vec::new();
    let room = ParcelRoom::new((args.engines.dynamo_tensors_gb * (1_u64 << 30) as f64) as u64);
    for upstream in &args.engines.upstream {
        let UpstreamArg::Dynamo(address) = upstream else { continue };
        let tensors = ready_tensors(address, model, &room)?;
        if tensors.is_some() {
            chiasm_transfer::sweep();
        }
        let directory =
            Directory::follow(address, &args.agents.etcd_tls(), ModelFiles::read(&model.dir));
        let directory =
            directory.map_err(|error| CliError::Usage(format!("--upstream {address}: {error}")))?;
        let keeper = Keeper {
            workers: directory.workers(),
            home: address.call_home(),
            fleet: fleet.clone(),
            processor: model.processor(),
            tensors,
            largest_item: model.largest_item(TakenKinds::ALL),
            takes_images: address.takes_images(),
            kept: HashMap::new(),
        };
        tokio::spawn(keeper.keep());
        directories.push(directory);
    }
    Ok(Dynamo { _directories: directories })
}

/// The tensors that workers of this machine are given, if that is asked for.
fn ready_tensors(
    address: &DynamoAddress,
    model: &ServedModel,
    room: &ParcelRoom,
) -> Result<Option<ReadyTensors>, CliError> {
    let Some(asked) = address.tensors() else { return Ok(None) };
    let wrong = |why: &str| CliError::Usage(format!("--upstream {address}: {why}"));
    let Some(vision) = &model.vision else {
        return Err(wrong("tensors are of models whose images Chiasm makes itself"));
    };
    let format = match asked {
        TensorsFor::Any(format) => format,
        TensorsFor::OwnVllm
            if vision.engine_normalizes_since().is_some_and(|since| since <= VLLM_OF_DYNAMO) =>
        {
            TensorFormat::Raw
        }
        // A worker does not say of which type its model is, and one that is given another one may
        // end.
        TensorsFor::OwnVllm => {
            return Err(wrong(
                "vLLM 0.31, which Dynamo 1.6.1 has, takes images of this model as floats of the type that the worker runs it in: \
                 say tensors=bfloat16, tensors=float16 or tensors=float32; or tensors=raw for a newer vLLM that normalises them itself",
            ));
        }
    };
    Ok(Some(ReadyTensors { format, room: room.clone() }))
}

/// Keeps the workers of one namespace.
struct Keeper {
    workers: watch::Receiver<Workers>,
    home: CallHome,
    fleet: Arc<Fleet>,
    processor: Arc<[u8]>,
    takes_images: bool,
    tensors: Option<ReadyTensors>,
    largest_item: LargestItem,
    /// Those that are in the fleet, by their names.
    kept: HashMap<String, Kept>,
}

struct Kept {
    id: WorkerId,
    /// Whether it is connected to.
    is_up: watch::Receiver<bool>,
    is_named: bool,
}

impl Keeper {
    /// Adds whatever is named, and removes what is not and is gone, until nobody looks any more or
    /// the fleet is shut down.
    async fn keep(mut self) {
        loop {
            let named: Vec<String> =
                self.workers.borrow_and_update().names().map(str::to_owned).collect();
            self.note(&named);
            for name in named {
                if !self.kept.contains_key(&name) && !self.add(name) {
                    return;
                }
            }
            tokio::select! {
                changed = self.workers.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    /// Takes note of which workers are named. One that is not goes on for as long as it is
    /// connected to.
    fn note(&mut self, named: &[String]) {
        let fleet = &self.fleet;
        self.kept.retain(|name, kept| {
            let is_named = named.contains(name);
            if std::mem::replace(&mut kept.is_named, is_named) != is_named {
                fleet.set_named(kept.id, is_named);
                if !is_named {
                    tracing::info!(
                        worker = name,
                        "a worker of Dynamo is named no more; it goes on while it is connected to"
                    );
                }
            }
            let stays = is_named || *kept.is_up.borrow();
            if !stays {
                tracing::info!(
                    worker = name,
                    "a worker of Dynamo is gone: nothing names it, and it can't be connected to"
                );
                fleet.remove(kept.id);
            }
            stays
        });
    }

    /// False if the fleet takes none any more.
    fn add(&mut self, name: String) -> bool {
        let connector = DynamoConnector::new(
            &name,
            self.workers.clone(),
            self.home.clone(),
            self.processor.clone(),
        )
        .with_images(self.takes_images)
        .with_tensors(self.tensors.clone())
        .with_largest_item(self.largest_item.clone());
        let is_up = connector.is_up();
        let Some(id) = self.fleet.add(Box::new(connector)) else { return false };
        self.kept.insert(name, Kept { id, is_up, is_named: true });
        true
    }
}
