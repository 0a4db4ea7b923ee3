"""The verbs of the command `run`: what each does, an example, and the words that it takes."""

VERBS = {
    "run": "train (the default verb)",
    "list": "groups, options and recipes",
    "explain": "an option: meaning, range, default, origin",
    "schema": "JSON Schema of a job, or of a recipe",
    "resume": "continue a run from its newest checkpoint",
    "status": "progress of a run, its processes, its newest metrics",
    "infer": "generate completions with a run's model, or any other",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP, with OpenAI's API",
    "tinker": "serve training over HTTP, with the Tinker SDK",
    "eval": "measure models on held-out sets, side by side",
    "export": "write a Hugging Face folder or a PEFT adapter",
    "sweep": "resume a sweep, or show its state",
    "report": "a run as one HTML page",
    "diff": "compare two runs",
    "new": "create a package that adds a component",
    "migrate": "rewrite old option names in YAML files",
    "doctor": "check this machine: what is wrong, what to type",
    "plan": "estimate memory and time of a job, without a card",
    "bench": "measure tokens/s, MFU and memory of a device",
    "parity": "check that another device computes the same",
    "help": "more help: recipes, options, verbs, or a verb",
}
EXAMPLES = {
    "run": "run +recipe=dpo_demo optimizer.lr=1e-3",
    "list": "run list device",
    "explain": "run explain optimizer.lr",
    "schema": "run schema recipe",
    "resume": "run resume latest steps=400",
    "status": "run status latest",
    "infer": 'run infer latest "sort 5031"',
    "chat": "run chat latest",
    "serve": "run serve latest port=8001",
    "tinker": "run tinker device=npu",
    "eval": "run eval latest +evaluation=gsm8k",
    "export": "run export latest --checkpoint best",
    "sweep": "run sweep status latest",
    "report": "run report latest",
    "diff": "run diff outputs/DATE/A latest",
    "new": "run new reward words",
    "migrate": "run migrate recipes/mine.yaml",
    "doctor": "run doctor +recipe=grpo_npu",
    "plan": "run plan +recipe=sft_npu",
    "bench": "run bench device=cuda",
    "parity": "run parity --record cpu",
    "help": "run help recipes",
}
VERBS_GROUP = "runner.verbs"  # entry points: name → "module:function" of the words after it, which returns a code
RESOURCE_NAMES = {
    "run": "+recipe=NAME or FILE.yaml, group=option, group.key=value",
    "list": "a group",
    "explain": "a key, a group, or group=option",
    "schema": "job or recipe",
    "resume": "latest or a run's folder, then group.key=value",
    "status": "latest or a run's folder",
    "infer": "a model (latest, a run's folder, a model's or an adapter's folder, a hub id), then prompts, "
    "device=NAME; words after -- are always prompts",
    "chat": "a model (latest, a run's folder, a model's or an adapter's folder, a hub id), device=NAME",
    "serve": "latest, a run, a model's or adapter's folder, or a hub id; engine=auto|torch|vllm host= port= device=\n"
    "max_num_seqs= grace_s= start_timeout_s= logprobs_mode=raw|processed\n"
    "weight_updates=true; words after -- are options of vllm serve",
    "eval": "models (latest, a run's folder, a model's or an adapter's folder, a hub id), '+evaluation=[SET,SET]',\n"
    "evaluation.sets.NAME={data: …, reward: …}, device=NAME; without a set: what the first run evaluates;\n"
    "suite=lm_eval|inspect tasks=TASK,FILE.yaml; words after -- are options of the harness",
    "export": "latest or a run's folder, device=NAME",
    "sweep": "resume, status or report; latest or a sweep's folder; with resume: sweep.parallel=N and similar options",
    "report": "latest or a run's folder",
    "diff": "two runs, each latest or a folder",
    "new": "reward, loss, environment, tracker, callback, optimizer or verb; then a name",
    "migrate": "recipes or config files of yours, written for an older version",
    "tinker": "options of a job: model=hf model.path=FOLDER device=NAME tinker.port=PORT tinker.max_tenants=N",
    "doctor": "device=NAME sampler=NAME launch=NAME (default: all devices here), suite=NAME, or a job as for run",
    "plan": "a job as for run",
    "bench": "options of a job (key=value), applied to every case",
    "parity": "with --record a job as for run; with --compare device=NAME and other options of this machine",
    "help": "recipes, options, verbs, or a verb",
}
COMBINATIONS = ("linear", "ties", "dare_linear", "dare_ties", "cat", "svd")  # peft's, of adapters
ACTIONS = ("resume", "status", "report")  # of run sweep
TOPICS = ("recipes", "options", "verbs")  # of run help
