"""Command lines of other frameworks, and Hydra's flags: each word is answered with what is typed here."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runner.cli.main import main
from runner.spec.migrate import Job, MigrationTable

HEAD = "choices: {}\nabsent: {}\nmetrics: {}\nflags: {}\ncommands: {}\nverbs: {}\n"
HEAD += "pages:\n  ours:\n    about: x\n    keys:\n"


def test_an_old_name_of_ours_is_one_line_of_the_table() -> None:
    table = MigrationTable(
        yaml.safe_load(
            HEAD + "      algorithm.old=clip: {values: {clip: algorithm.new=clipped}, to: 'algorithm.new={}'}\n"
        )
    )
    entry = table.find("algorithm.old")
    assert entry is not None
    assert [str(table.answers(entry, value, Job())[0]) for value in ("clip", "other")] == [
        "type algorithm.new=clipped",
        "type algorithm.new=other",
    ]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            "swift rlhf --rlhf_type grpo --beta 0.04 --num_generations 8 --per_device_train_batch_size=4 --seed 3",
            [
                "algorithm=grpo",
                "algorithm.kl_estimator=k3 algorithm.kl_coef=0.04\n",
                "group_size=8\n",
                "batch_size=1 ",
                "type seed=3",
            ],
        ),
        ("trl sft --num_train_epochs 3 --warmup_ratio 0.1", ["epochs=3\n", "warmup_steps=N, N = 0.1 × steps (of all"]),
        ("sft --max_steps -1 --warmup_ratio 0.1", ["max_steps: leave it out\n", "warmup_steps=N, N = 0.1 × steps (of"]),
        ("sft --max_steps 500 --warmup_ratio 0.1", ["type steps=500\n", "type schedule.warmup_steps=50 (of all steps"]),
        (
            "swift rlhf --rlhf_type gkd --beta 0.5",
            ["algorithm=opd (reverse KL", "--beta: GKD's mixture of divergences is"],
        ),
        ("algorithm=opd --beta 1.0", ["--beta: leave it out: opd is the reverse KL"]),
        ("algorithm=distill --beta 0", ["--beta: type algorithm.divergence=forward_kl\n"]),
        (
            "algorithm=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001 use_kl_loss=False "
            "kl_loss_coef=0.01 kl_loss_type=mse",
            [
                "algorithm.kl_ctrl.kl_coef: not an option of algorithm=grpo; leave it out: unused unless",
                "kl_loss_coef: not an option of a job; leave it out: unused unless",
                "kl_loss_type: not an option of a job; leave it out: unused unless",
            ],
        ),
        (
            "algorithm=grpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 use_kl_loss=False",
            ["type algorithm.kl_estimator=k1 algorithm.kl_in=reward algorithm.kl_coef=0.001 ", "job; leave it out "],
        ),
        (
            "algorithm=grpo use_kl_loss=True kl_loss_coef=0.01 kl_loss_type=mse",
            [
                "type algorithm.kl_in=loss algorithm.kl_coef=0.01 ",
                "type algorithm.kl_estimator=k2 algorithm.kl_in=loss ",
            ],
        ),
        ("trl dpo --loss_type sigmoid sft", ["sigmoid: type algorithm.loss=sigmoid; sft: type algorithm.sft_coef=1 "]),
        (
            "trl grpo --reward_funcs accuracy format",
            ["accuracy: type reward=math (the right answer is in the column answer); [format]: your own function: "],
        ),
        ("trl sft --target_modules q_proj v_proj", ["--target_modules: type adapter=lora adapter.targets=[q_proj,v"]),
        ("trl sft --target_modules all-linear", ["--target_modules: type adapter=lora adapter.targets=all-linear\n"]),
        (
            "trl grpo --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 8 "
            "--num_generations 8 --num_processes 8",
            [
                "--per_device_train_batch_size: type algorithm.batch_size=32 ",
                "--gradient_accumulation_steps: type algorithm.mini_batches=4 ",
                "--steps_per_generation: type algorithm.mini_batches=4 ",
            ],
        ),
        (
            "trl grpo --per_device_train_batch_size 4 --generation_batch_size 256 --num_generations 8 --num_gpus 8",
            [
                "--per_device_train_batch_size: type algorithm.mini_batches=8 ",
                "--generation_batch_size: type algorithm.batch_size=32 ",
            ],
        ),
        ("trl grpo --steps_per_generation 8", ["type algorithm.mini_batches=8 "]),
        (
            "trl sft --packing true --max_length 8192 --per_device_train_batch_size 1 --gradient_accumulation_steps 8",
            [
                "N = 1 × gradient_accumulation_steps × launch.devices × launch.nodes × data.max_length / tokens",
                "N = 8 × per_device_train_batch_size × launch.devices × launch.nodes × data.max_length / tokens",
            ],
        ),
        ("sft --padding_free true --per_device_train_batch_size 4", ["type algorithm.batch_size=4 (rows of a step"]),
        (
            "megatron sft --packing --global_batch_size 16",
            ["N = 16 × data.max_length / tokens"],
        ),
        (
            "trl rloo --beta 0.05",
            ["--beta: type algorithm.kl_estimator=k1 algorithm.kl_in=reward algorithm.kl_coef=0.05\n"],
        ),
        # the same loss
        (
            "swift rlhf --rlhf_type simpo --cpo_alpha 0 --beta 2",
            ["algorithm=simpo algorithm.sft_coef=0 ", "type algorithm.sft_coef=0 ", "--beta: type algorithm.beta=2\n"],
        ),
        (
            "swift rlhf --cpo_alpha 0.5 --rlhf_type simpo",
            ["algorithm=simpo algorithm.sft_coef=0.5 ", "sft_coef=0.5 (a"],
        ),
        (
            "swift rlhf --rlhf_type simpo",
            ["type algorithm=simpo algorithm.sft_coef=1 (the other"],
        ),
        ("axolotl train --rl simpo", ["type algorithm=simpo algorithm.sft_coef=1 (the other"]),
        ("algorithm=simpo --cpo_alpha 0.5", ["--cpo_alpha: type algorithm.sft_coef=0.5 "]),
        (
            "swift rlhf --rlhf_type cpo --cpo_alpha 0.5 --beta 0.2",
            [
                "type algorithm=cpo algorithm.loss=cpo_averaged\n",
                "type algorithm.loss=cpo_averaged algorithm.alpha=0.5\n",
                "--beta: type algorithm.beta=0.2\n",
            ],
        ),
        ("swift rlhf --rlhf_type orpo --beta 0.1", ["--beta: type algorithm.loss=orpo algorithm.lam=0.1\n"]),
        (
            "algorithm=orpo rlhf_type=orpo beta=0.1",
            ["beta: not an option of a job; type algorithm.loss=orpo algorithm.l"],
        ),
        (
            "llamafactory-cli train --stage dpo --pref_loss orpo --pref_beta 0.1",
            ["algorithm.loss=orpo algorithm.lam=0.1"],
        ),
        ("algorithm.adv_estimator=reinforce_plus_plus kl_loss_coef=0.1", ["job; leave it out: unused unless"]),
        (
            "trl dpo --loss_type robust --label_smoothing 0.1",
            ["--loss_type: type algorithm.loss=robust\n", "type algorithm.loss=robust algorithm.label_smoothing=0.1\n"],
        ),
        (
            "trl dpo --label_smoothing 0.1 --loss_type sigmoid",
            ["--loss_type: type algorithm.loss=conservative\n", "loss=conservative algorithm.label_smoothing=0.1\n"],
        ),
        ("trl dpo --label_smoothing 0.1", ["type algorithm.loss=conservative algorithm.label_smoothing=0.1\n"]),
        (
            "trl dpo --label_smoothing 0.1 --loss_type hinge",
            ["--label_smoothing: only algorithm.loss=conservative and"],
        ),
        ("trl dpo --label_smoothing 0 --loss_type sigmoid", ["--label_smoothing: leave it out\n", "loss=sigmoid\n"]),
        ("trl grpo --loss_type sapo", ["policy_loss=sapo algorithm.loss_aggregation=seq_mean_token_mean\n"]),
        (
            "algorithm=grpo actor_rollout_ref.actor.policy_loss.loss_mode=sapo loss_agg_mode=token-mean",
            [
                "policy_loss=sapo algorithm.loss_aggregation=seq_mean_token_mean ",
                "job; leave it out: verl does not use it with",
            ],
        ),
        # the same KL
        ("trl grpo --beta 0.04", ["--beta: type algorithm.kl_estimator=k3_ratio algorithm.kl_coef=0.04\n"]),
        (
            "trl grpo --beta 0.04 --use_bias_correction_kl false",
            ["--beta: type algorithm.kl_estimator=k3 algorithm.kl_coef=0.04\n", "leave it out: the line of beta sets"],
        ),
        ("trl grpo --use_bias_correction_kl true", ["--use_bias_correction_kl: leave it out: unused unless beta is"]),
        ("trl grpo --init_kl_coef 0.05", ["--init_kl_coef: type algorithm.kl_estimator=k3 algorithm.kl_coef=0.05\n"]),
        (
            "swift rlhf --rlhf_type grpo --advantage_estimator reinforce_plus_plus --beta 0.04",
            [
                "type algorithm.advantage=reinforce_pp_baseline algorithm.zero_variance=keep (whitened",
                "--beta: type algorithm.kl_estimator=k1 algorithm.kl_in=reward algorithm.kl_coef=0.04\n",
            ],
        ),
        (
            "grpo --advantage_estimator reinforce_plus_plus",
            ["type algorithm.advantage=reinforce_pp_baseline algorithm"],
        ),
        ("grpo --advantage_estimator reinforce", ["--advantage_estimator: type algorithm=reinforce_pp\n"]),
        (
            "llamafactory-cli train --stage ppo --ppo_target 6.0",
            ["type algorithm.kl_estimator=k1 algorithm.kl_target=N, N = 6.0 / tokens_per_completion (LLaMA-Factory"],
        ),
        ("ppo --kl_target 0.1", ["--kl_target: type algorithm.kl_estimator=k1 algorithm.kl_target=0.1\n"]),
        # the same weights of samples
        (
            "trl grpo --vllm_importance_sampling_mode token_truncate",
            ["correction_level=token algorithm.correction_max=3\n"],
        ),
        (
            "trl grpo --vllm_importance_sampling_clip_max 2.5 --vllm_importance_sampling_mode token_truncate",
            [
                "clip_max: leave it out: the line of vllm_importance_sampling_mode sets this already\n",
                "type algorithm.correction=tis algorithm.correction_level=token algorithm.correction_max=2.5\n",
            ],
        ),
        (
            "trl grpo --vllm_importance_sampling_clip_min 0.2 --vllm_importance_sampling_mode sequence_mask",
            [
                "clip_min: leave it out: the line of vllm_importance_sampling_mode sets this already\n",
                "correction_level=sequence algorithm.correction_max=3 algorithm.correction_min=0.2\n",
            ],
        ),
        (
            "trl grpo --vllm_importance_sampling_clip_min 0.2",
            ["correction_level=sequence algorithm.correction_max=3 algorithm.correction_min=0.2\n"],
        ),
        (
            "trl grpo --vllm_importance_sampling_cap 2.0 --vllm_importance_sampling_correction true",
            ["algorithm.correction=mis algorithm.correction_level=sequence algorithm.correction_max=2.0 "],
        ),
        (
            "trl grpo --vllm_importance_sampling_cap 2.0 --vllm_importance_sampling_correction false",
            ["leave it out: unused"],
        ),
        (
            "swift rlhf --rlhf_type grpo --rollout_importance_sampling_mode token_mask",
            ["algorithm.correction=mis algorithm.correction_level=token algorithm.correction_max=2 "],
        ),
        (
            "swift rlhf --rlhf_type grpo --rollout_importance_sampling_mode sequence_mask",
            ["ms-swift takes the geometric mean of a sequence's token weights, and this project their product; type"],
        ),
        ("grpo --enable_vllm_is_correction", ["algorithm.correction=tis algorithm.correction_level=token algorithm.c"]),
        (
            "algorithm=grpo algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_rs=token algorithm.rollout_correction.rollout_rs_threshold=4.0",
            [
                "rollout_is: not an option of algorithm=grpo; leave it out: the line of rollout_rs sets this already ",
                "correction_level=token algorithm.correction_max=4 algorithm.correction_min=0.25 (mis masks",
            ],
        ),
        # the same number of steps and rows
        (
            "trl grpo --max_steps 500 --num_iterations 2 --steps_per_generation 4 --warmup_ratio 0.1 --save_steps 100 "
            "--eval_steps 50 --warmup_steps 20",
            [
                "--max_steps: type steps=63 (in TRL and ms-swift a step is one optimizer update",
                "--warmup_ratio: type schedule.warmup_steps=7 (",
                "--save_steps: type checkpoint.every=13 (",
                "--eval_steps: type evaluation.every=7 (",
                "--warmup_steps: type schedule.warmup_steps=3 (",
            ],
        ),
        (
            "trl grpo --max_steps 500 --generation_batch_size 256 --per_device_train_batch_size 8 --num_gpus 8",
            ["--max_steps: type steps=125 (", "type algorithm.batch_size=32 algorithm.mini_batches=4 ("],
        ),
        (
            "trl grpo --max_steps 500 --generation_batch_size 256",
            ["--max_steps: type steps=N, N = 500 / (algorithm.mini_batches × algorithm.epochs) (in TRL"],
        ),
        ("trl grpo --max_steps 500 --save_steps 100", ["type steps=500\n", "type checkpoint.every=100\n"]),
        ("trl grpo --max_steps -1 --num_iterations 2", ["--max_steps: leave it out\n"]),
        ("ppo --num_episodes 2", ["--num_episodes: type epochs=2 (passes"]),
        (
            "sft --nproc_per_node 8 --nnodes 2 --per_device_train_batch_size 4",
            [
                "--nproc_per_node: type launch.devices=8\n",
                "type launch.nodes=2 (",
                "type algorithm.batch_size=64 (rows",
            ],
        ),
        ("sft --num_processes 8 --num_machines 2", ["--num_processes: type launch.devices=4\n"]),
        # the same tokens
        (
            "trl sft --assistant_only_loss false",
            ["type chat.train_on=all (for rows with messages or text; with prompt "],
        ),
        (
            "trl sft --assistant_only_loss false --completion_only_loss true",
            [
                "--assistant_only_loss: leave it out: the line of completion_only_loss sets this already\n",
                "type chat.train_on=assi",
            ],
        ),
        # the start of a command
        (
            "python3 -u -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8",
            [
                "no verb named 'python3'; type run …\n",
                "algorithm.adv_estimator: type algorithm=grpo\n",
                "actor_rollout_ref.rollout.n: type algorithm.group_size=8\n",
            ],
        ),
        ("python train.py seed=1", ["no verb named 'python'; type run …\n"]),
        (
            "torchrun --nproc_per_node 8 --nnodes 2 src/train.py x.yaml --stage sft --learning_rate 1e-5",
            ["type run +recipe=x.yaml", "launch.devices=8\n", "launch.nodes=2 (", "algorithm=sft\n", "lr=1e-05\n"],
        ),
        ("accelerate launch --num_processes 4 -m axolotl.cli.train x.yaml", ["+recipe=x.yaml\n", "launch.devices=4\n"]),
        (
            "python -m torch.distributed.run --nproc_per_node 8 train.py --learning_rate 1e-5",
            ["no verb named 'torchrun'; type run …\n", "nproc_per_node: type launch.devices=8\n", "lr=1e-05\n"],
        ),
        ("deepspeed train.py", ["no verb named 'deepspeed'; to start processes: launch.devices=N"]),
        ("accelerate launch train.py", ["no verb named 'accelerate launch'; to start processes: launch.devices=N"]),
        ("accelerate launch", ["to start processes: launch.devices=N"]),
        ("trl rloo --beta 0.0", ["--beta: type algorithm.kl_estimator=none\n"]),
        ("swift rlhf --rlhf_type grpo --kl_in_reward true --beta 0.04", ["kl_in=reward algorithm.kl_coef=0.04\n"]),
        (
            "swift rlhf --rlhf_type grpo --advantage_estimator rloo --kl_in_reward false --beta 0.04",
            ["--beta: type algorithm.kl_estimator=k3 algorithm.kl_coef=0.04\n"],
        ),
        ("algorithm.adv_estimator=rloo", ["type algorithm=grpo algorithm.advantage=leave_one_out "]),
        (
            "algorithm.adv_estimator=reinforce_plus_plus",
            ["type algorithm=reinforce_pp (with its paper's KL, which verl"],
        ),
        ("sft", ["no verb named 'sft'; type run algorithm=sft"]),
        ("llamafactory-cli train x.yaml", ["type run +recipe=x.yaml"]),
        ("swift infer", ["run infer latest"]),
        ("algorithm=dpo --beta 0.2", ["type algorithm.beta=0.2\n"]),
        ("-cn x", ["+recipe=NAME"]),
        ("-p model", ["run --cfg job"]),
        ("--resolve", ["leave it out"]),
        ("--cfg hydra", ["to print the job: run --cfg job"]),
        ("--info all", ["--info searchpath"]),
        ("hydra.run.dir=x", ["--folder FOLDER"]),
        ("hydra/launcher=submitit_slurm", ["type sweep.on=slurm"]),
        (
            "actor_rollout_ref.rollout.n=8 actor_rollout_ref.x.y=1",
            ["algorithm.group_size=8", "actor_rollout_ref.x.y: not an"],
        ),
        (
            "--enable_thinking false --split_dataset_ratio 0.01 --kl_in_reward true --freeze_vit true",
            [
                "type 'chat.kwargs={enable_thinking:false}'\n",
                "type data=file data.holdout=0.01\n",
                "algorithm.kl_in=reward",
                "'model.freeze=[vision,aligner,language]'",
            ],
        ),
        (
            "data.prompt_key=question algorithm=grpo algorithm.rollout_correction.rollout_is=sequence",
            ["'data.rename_columns={question:prompt}'", "algorithm.correction=tis algorithm.correction_level=sequence"],
        ),
        ("reward=my.py:score", ["type reward=function reward.path=my.py:score"]),
        ("reward=[exact,length]", ["takes one choice, not a list; for a weighted sum type reward=sum"]),
        ("environment=my.py:Env", ["a choice is a component, not a file"]),
        ("checkpoint.best=eval_loss", ["type checkpoint.best=eval/loss"]),
        ("-m seed=1,2 sweep.metric=eval_loss", ["type sweep.metric=eval/loss"]),
    ],
)
def test_each_word_is_answered(
    words: str, messages: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert [message for message in messages if message not in err] == []
