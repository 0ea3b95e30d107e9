//! Tests that the manifests of `deploy/kubernetes` fit this command line and each other.
//! `python/manifests` tests them against Kubernetes' schemas.

use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::CommandFactory;
use yaml_rust2::{Yaml, YamlLoader};

use super::{Cli, Command, ServeArgs, is_frontend_only};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes");
/// The variables of containers that belong to no flag: one that flag values refer to, and those of
/// the Hugging Face hub.
const OTHER_VARIABLES: [&str; 3] = ["POD_NAMESPACE", "HF_HOME", "HF_TOKEN"];

/// A DaemonSet or a Deployment with one container per pod.
struct Workload {
    manifest: Yaml,
}

impl Workload {
    fn agents() -> Self {
        Self { manifest: single("DaemonSet") }
    }

    fn frontends() -> Self {
        Self { manifest: single("Deployment") }
    }

    fn template(&self) -> &Yaml {
        &self.manifest["spec"]["template"]
    }

    fn pod(&self) -> &Yaml {
        &self.template()["spec"]
    }

    fn container(&self) -> &Yaml {
        let [container] = &items(&self.pod()["containers"])[..] else { panic!("one container") };
        container
    }

    /// Parses a command line in this container, with the container's environment variables and the
    /// substitutions of Kubernetes.
    fn parse(&self, words: &[&str]) -> Command {
        assert_eq!(words[0], "chiasm");
        let command = Cli::command();
        let subcommand = command.find_subcommand(words[1]).expect(words[1]);
        let flags = items(&self.container()["env"]).iter().filter_map(|variable| {
            let has_name = |arg: &&clap::Arg| {
                arg.get_env().is_some_and(|name| name == text(&variable["name"]))
            };
            let arg = subcommand.get_arguments().find(has_name)?;
            let is_refused = words[1] == "agent" && is_frontend_only(arg);
            let flag = arg.get_long().filter(|_| !is_refused)?;
            Some(format!("--{flag}={}", variable["value"].as_str()?))
        });
        let words = words.iter().map(|word| word.replace("$(POD_NAMESPACE)", "default"));
        let mut words: Vec<String> = words.collect();
        // In front of `--` and vLLM's flags.
        words.splice(2..2, flags);
        assert!(!words.iter().any(|word| word.contains("$(")), "{words:?}");
        Cli::parse_args(&words).unwrap_or_else(|error| panic!("{words:?}: {error}")).command
    }

    /// Parses the container's own command line.
    fn args(&self) -> Box<ServeArgs> {
        let container = self.container();
        let words = items(&container["command"]).iter().chain(items(&container["args"]));
        match self.parse(&words.map(text).collect::<Vec<_>>()) {
            Command::Serve(args) | Command::Agent(args) => args,
            other => panic!("{other:?}"),
        }
    }

    /// Parses a command that Kubernetes runs in the container, such as a probe.
    fn parse_action(&self, action: &Yaml) -> Command {
        self.parse(&items(&action["exec"]["command"]).iter().map(text).collect::<Vec<_>>())
    }

    fn termination_grace_period(&self) -> Duration {
        Duration::from_secs(
            self.pod()["terminationGracePeriodSeconds"].as_i64().unwrap().try_into().unwrap(),
        )
    }

    fn is_selected_by(&self, selector: &Yaml) -> bool {
        let labels = self.template()["metadata"]["labels"].as_hash().unwrap();
        let selector = selector.as_hash().unwrap();
        !selector.is_empty() && selector.iter().all(|(name, value)| labels.get(name) == Some(value))
    }
}

fn manifests() -> Vec<Yaml> {
    let files = fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files
        .flat_map(|path| YamlLoader::load_from_str(&fs::read_to_string(path).unwrap()).unwrap())
        .collect()
}

fn all(kind: &str) -> Vec<Yaml> {
    manifests().into_iter().filter(|manifest| text(&manifest["kind"]) == kind).collect()
}

fn single(kind: &str) -> Yaml {
    let [manifest] =
        <[Yaml; 1]>::try_from(all(kind)).unwrap_or_else(|all| panic!("{} of {kind}", all.len()));
    manifest
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

fn items(yaml: &Yaml) -> &Vec<Yaml> {
    yaml.as_vec().unwrap_or_else(|| panic!("no list: {yaml:?}"))
}

#[test]
fn container_variables_belong_to_flags() {
    for (workload, command) in [(Workload::agents(), "agent"), (Workload::frontends(), "serve")] {
        let cli = Cli::command();
        let known: Vec<_> = cli
            .find_subcommand(command)
            .unwrap()
            .get_arguments()
            .filter_map(|arg| arg.get_env())
            .collect();
        for variable in items(&workload.container()["env"]) {
            let name = text(&variable["name"]);
            assert!(
                OTHER_VARIABLES.contains(&name) || known.iter().any(|known| *known == name),
                "{name}"
            );
        }
        // Otherwise Kubernetes would set service variables with the same names.
        assert_eq!(workload.pod()["enableServiceLinks"].as_bool(), Some(false));
    }
}

#[test]
fn agent_manifest_fits_frontend_manifest() {
    let agents = Workload::agents();
    let agent = agents.args();
    let frontend = Workload::frontends().args();
    assert_eq!(agent.model, frontend.model);
    assert_eq!(agent.engines.mm_processor_kwargs, frontend.engines.mm_processor_kwargs);
    assert!(
        agent.agents.tls.agent_certfile.is_some() && frontend.agents.tls.agent_certfile.is_some()
    );
    let gpus = &agents.container()["resources"]["limits"]["nvidia.com/gpu"];
    let needed_gpus = agent.engines.engines.unwrap().roles().count() as u32
        * agent.engines.gpus_per_engine.unwrap();
    assert_eq!(gpus.as_i64(), Some(needed_gpus.into()));
    // Frontends must discover agents before they admit them.
    let services = all("Service");
    let service = services
        .iter()
        .find(|service| agents.is_selected_by(&service["spec"]["selector"]))
        .unwrap();
    assert_eq!(service["spec"]["publishNotReadyAddresses"].as_bool(), Some(true));
    let port = &items(&service["spec"]["ports"])[0];
    let url = format!(
        "kubernetes://default/{}:{}",
        text(&service["metadata"]["name"]),
        text(&port["name"])
    );
    assert_eq!(frontend.agents.discovery.unwrap().to_string(), url);
}

#[test]
fn services_select_their_workloads() {
    let workloads = [Workload::agents(), Workload::frontends()];
    for workload in &workloads {
        let [port] = &items(&workload.container()["ports"])[..] else { panic!("one port") };
        assert_eq!(port["containerPort"].as_i64(), Some(workload.args().port.into()));
        assert!(workload.is_selected_by(&workload.manifest["spec"]["selector"]["matchLabels"]));
        let services = all("Service")
            .into_iter()
            .filter(|service| workload.is_selected_by(&service["spec"]["selector"]));
        let [service] = <[Yaml; 1]>::try_from(services.collect::<Vec<_>>()).unwrap();
        assert_eq!(items(&service["spec"]["ports"])[0]["targetPort"], port["name"]);
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let probe = &workload.container()[probe];
            assert!(probe["httpGet"].is_badvalue() || probe["httpGet"]["port"] == port["name"]);
        }
    }
    let [agents, frontends] = workloads;
    let policy = single("NetworkPolicy");
    let rule = &policy["spec"]["ingress"][0];
    assert!(agents.is_selected_by(&policy["spec"]["podSelector"]["matchLabels"]));
    assert!(frontends.is_selected_by(&rule["from"][0]["podSelector"]["matchLabels"]));
    assert_eq!(rule["ports"][0]["port"], agents.container()["ports"][0]["name"]);
    let budget = single("PodDisruptionBudget");
    assert!(frontends.is_selected_by(&budget["spec"]["selector"]["matchLabels"]));
}

#[test]
fn agent_container_commands_use_its_port() {
    let agents = Workload::agents();
    let container = agents.container();
    let address = format!("127.0.0.1:{}", agents.args().port);
    for (probe, admitted) in
        [("startupProbe", false), ("livenessProbe", false), ("readinessProbe", true)]
    {
        let Command::Probe(args) = agents.parse_action(&container[probe]) else {
            panic!("{probe}")
        };
        assert_eq!((args.agent, args.admitted), (address.clone(), admitted), "{probe}");
        assert!(args.tls.agent_tls_name.is_some());
    }
    let Command::Drain(drain) = agents.parse_action(&container["lifecycle"]["preStop"]) else {
        panic!("drain")
    };
    assert_eq!((drain.agent, drain.resume), (address, false));
    assert!(agents.termination_grace_period() > drain.wait + agents.args().limits.drain_timeout);
}

#[test]
fn frontend_has_time_to_drain() {
    let frontends = Workload::frontends();
    let limits = frontends.args().limits;
    assert!(
        limits.drain_delay > Duration::ZERO
            && frontends.termination_grace_period() > limits.drain_delay + limits.drain_timeout
    );
    assert_eq!(text(&frontends.container()["readinessProbe"]["httpGet"]["path"]), "/ready");
    assert_eq!(text(&frontends.container()["livenessProbe"]["httpGet"]["path"]), "/health");
}

#[test]
fn files_are_in_volumes_that_are_mounted() {
    for workload in [Workload::agents(), Workload::frontends()] {
        let has_volume = |mount: &Yaml| {
            items(&workload.pod()["volumes"]).iter().any(|volume| volume["name"] == mount["name"])
        };
        let mounts = items(&workload.container()["volumeMounts"]);
        assert!(mounts.iter().all(has_volume));
        let args = workload.args();
        let tls = args.agents.tls;
        for file in
            [args.agents.block_key_secret, tls.agent_certfile, tls.agent_keyfile, tls.agent_ca_file]
        {
            let folder = file.as_deref().and_then(Path::parent).unwrap();
            assert!(
                mounts.iter().any(|mount| Path::new(text(&mount["mountPath"])) == folder),
                "{}",
                folder.display()
            );
        }
    }
}

#[test]
fn only_frontends_may_read_endpoint_slices() {
    let role = single("Role");
    let binding = single("RoleBinding");
    let account = single("ServiceAccount");
    let [rule] = &items(&role["rules"])[..] else { panic!("one rule") };
    let values = |field: &str| items(&rule[field]).iter().map(text).collect::<Vec<_>>();
    assert_eq!(
        [values("apiGroups"), values("resources")],
        [["discovery.k8s.io"], ["endpointslices"]]
    );
    assert_eq!(values("verbs"), ["list", "watch"]);
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["name"], account["metadata"]["name"]);
    assert_eq!(Workload::frontends().pod()["serviceAccountName"], account["metadata"]["name"]);
    assert_eq!(Workload::agents().pod()["automountServiceAccountToken"].as_bool(), Some(false));
}
