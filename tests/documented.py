"""Which tests show what the pages say, by page and heading."""

DOCUMENTED = {
    "api/errors": {
        '"marks more than one value"': [
            "test_errors.py::test_duplicate",
            "test_errors.py::test_a_duplicate_tells_where_and_what_helps",
        ],
        '"runs … times: at … Plant a tuple of" (`plant`)': [
            "test_several_runs.py::test_what_cannot_be_planted"
        ],
        '"selects no mark of this program"': [
            "test_errors.py::test_unknown_name",
            "test_errors.py::test_every_pattern_has_to_select",
            "test_patterns.py::test_what_would_fit_across_a_slash",
        ],
        '"Write which one"': ["test_patterns.py::test_several_roots"],
        '"There is no such iteration"': [
            "test_plant_iterations.py::test_errors",
            "test_iterations.py::test_the_index_stands_where_a_list_has_it",
            "test_lookup.py::test_a_name_that_is_not_there",
            "test_lookup.py::test_an_index_that_selects_no_layer_of_a_stack",
            "test_several_runs.py::test_an_iteration_of_a_python_loop",
        ],
        '"only if `names` asks for it", "All iterations … are one value"': [
            "test_iterations.py::test_an_iteration_in_other_options"
        ],
        '"is not a name here", "has no mode" (`intermediates[name][mode]`)': [
            "test_lookup.py::test_a_name_that_is_not_there",
            "test_lookup.py::test_a_mode_that_is_not_there",
            "test_lookup.py::test_what_was_computed_with_has_no_iterations",
        ],
        '"selects nothing that is called"': [
            "test_capture.py::test_nothing_found_tells_what_to_do",
            "test_capture.py::test_nothing_found_lists_the_modules_in_variables",
            "test_capture.py::test_selected_but_never_called",
            "test_capture.py::test_captured_inside_captured",
        ],
        '"is a method of no selected module", "Only methods that return their result are captured"': [
            "test_capture.py::test_a_method_that_no_module_has",
            "test_capture.py::test_modules_that_have_another_method_only",
            "test_errors.py::test_what_is_no_method_that_can_be_captured",
        ],
        '"is marked, but has no" (`plant`)': [
            "test_plant.py::test_no_name_has_a_cotangent",
            "test_plant.py::test_a_glob_plants_what_has_a_cotangent",
        ],
        '"there is nothing to compare" (`compare`)': [
            "test_compare.py::test_nothing_to_compare"
        ],
        '"is inside the primitive"': [
            "test_limits.py::test_refused",
            "test_limits.py::test_a_hidden_call",
            "test_register_rule.py::test_without_a_rule",
        ],
        '"would happen twice"': [
            "test_limits.py::test_a_callback_that_would_happen_twice"
        ],
        "In the condition of a `while_loop`": [
            "test_limits.py::test_refused",
            "test_control_flow.py::test_sow_in_a_while_condition_is_refused",
        ],
        "In a linear solve": [
            "test_limits.py::test_refused",
            "test_hard_cases.py::test_custom_linear_solve",
            "test_law13_places.py::test_a_module_that_is_called_in_a_solver_only",
        ],
        "A reducer other than `Append` in a `shard_map`": [
            "test_misuse.py::test_misuse",
            "test_refusals.py::test_order_counts_only_inside_a_shard_map",
        ],
        '"would wait for the others"': [
            "test_meshes.py::test_a_total_in_a_branch_of_some_devices",
        ],
        '"does not match its annotation"': [
            "test_spec.py::test_does_not_fit",
            "test_spec.py::test_message",
        ],
        '"which beartype ignores"': ["test_spec.py::test_what_beartype_ignores"],
        '"which is not a PyTree, and holds a traced array"': [
            "test_objects.py::test_where_the_array_is",
            "test_objects.py::test_every_way",
        ],
        '"behaves differently, so values that come back could be wrong"': [
            "test_canaries.py::test_the_message"
        ],
        '"does not work with JAX", "Another library has replaced JAX\'s rule"': [
            "test_errors.py::test_a_part_of_jax_that_has_moved",
            "test_errors.py::test_a_rule_that_another_library_has_replaced",
        ],
        '"was executed while the program around it was only being traced"': [
            "test_limits.py::test_executed_while_traced"
        ],
        '"is in the derivative rule of a function … that only some lanes"': [
            "test_hard_cases.py::test_derivative_rules_that_only_some_lanes_run"
        ],
        '"cannot tell whether the `bwd` repeats that one"': [
            "test_cotangents.py::test_a_recomputing_bwd_in_lanes_that_take_different_branches"
        ],
        '"is in a `jax.checkpoint` that was differentiated"': [
            "test_hard_cases.py::test_plant_in_a_checkpoint",
            "test_hard_cases.py::test_second_derivatives_of_a_checkpoint",
            "test_hard_cases.py::test_gradient_of_a_linearized_checkpoint",
        ],
        '"in several places, and their values differ"': [
            "test_control_flow.py::test_branches_that_disagree",
            "test_cotangents.py::test_a_numpy_array_in_one_branch_is_an_error",
        ],
        '"in several places that vary over different axes"': [
            "test_refusals.py::test_branches_with_different_vmaps_inside",
            "test_batched.py::test_batches_of_different_sizes_that_are_not_reduced",
        ],
        '"They cannot become one value"': [
            "test_cotangents.py::test_a_total_beside_values_of_each_lane_in_branches"
        ],
        '"belongs to which primal", "cannot tell which of these runs"': [
            "test_reducers.py::test_append_of_branches_that_differentiate_unlike_sows",
            "test_several_runs.py"
            "::test_values_that_a_backward_pass_computes_once_more_cannot_be_planted",
        ],
        '"would not be of the same executions" (`Buffer`)': [
            "test_reducers.py::test_rows_of_a_buffer_that_do_not_belong_together",
            "test_reducers.py::test_rows_of_a_buffer_of_other_executions",
        ],
        '"which iteration of it belongs to the value"': [
            "test_hard_cases.py::test_last_value_in_a_branch_that_is_not_differentiated",
            "test_hard_cases.py::test_a_while_that_takes_the_pullbacks_of_a_scan_apart",
        ],
        '"so it is not known whether there is an iteration" (`jax.export`)': [
            "test_export.py::test_iteration_that_there_may_not_be"
        ],
        '"no value of all lanes" (`batched`)': [
            "test_batched.py::test_a_condition_that_they_do_not_share_is_an_error"
        ],
        '"uses the axis name" (`transform`, `when`, `plant`, `Fold`)': [
            "test_batched.py::test_names_of_axes_where_only_some_lanes_run",
            "test_batched.py::test_batched_knows_no_names",
            "test_batched.py::test_a_fold_knows_no_names",
        ],
        '"has one value for all lanes of a `jax.vmap`" (`plant`)': [
            "test_batched.py::test_plant_of_what_differs_between_lanes_for_one_value"
        ],
        '"cannot see the lanes of an outer `jax.vmap`" (`tap` with `batched`)': [
            "test_batched.py::test_a_vmap_around_a_compiled_tap_is_an_error"
        ],
        '"cannot tell which module"': [
            "test_errors.py::test_a_gradient_that_may_be_that_of_either_of_two_modules"
        ],
        '"both mean"': ["test_patterns.py::test_two_keys_that_mean_one_mark"],
        '"not known which … is that of the layers" (`plant`, `compare`)': [
            "test_law14.py::test_equally_long_axes_are_not_mixed_up",
            "test_compare.py::test_the_axis_of_layers_is_found_by_lengths",
        ],
        '"has a leaf … where … is marked", "is what all layers have together", "has the '
        'structure" (`plant`)': [
            "test_misuse.py::test_misuse",
            "test_law14.py::test_an_array_for_all_layers_is_said_to_be_of_another_shape",
            "test_plant.py::test_a_value_that_does_not_fit",
            "test_plant.py::test_a_function_whose_result_does_not_fit",
        ],
        '"so only zeros fit there", "Leave None there" (`plant`)': [
            "test_plant.py::test_only_zeros_fit_where_there_is_no_tangent",
            "test_plant.py::test_only_zeros_fit_where_there_is_no_cotangent",
            "test_plant.py::test_only_zeros_fit_where_the_value_is_traced",
            "test_several_runs.py::test_what_cannot_be_planted",
        ],
        '"there is a NumPy array, in a function", "zeros are planted in the place of a NumPy array" (`plant`)': [
            "test_plant.py::test_another_array_in_the_place_of_a_numpy_array_that_is_traced"
        ],
        '"No value has the axes of all" (`plant`)': [
            "test_plant.py::test_a_name_in_branches_with_other_loops"
        ],
        '"`index` was compared with" (`plant`)': [
            "test_plant_index.py::test_an_index_that_is_compared_as_if_it_were_a_number"
        ],
        '"is the only layer of its list", "with different loops around the list of layers" (`plant`)': [
            "test_plant_index.py::test_a_list_of_one_layer_in_a_loop",
            "test_plant_index.py::test_a_list_in_different_loops",
        ],
        '"cannot be checked in a `jax.shard_map`" (`plant`)': [
            "test_meshes.py::test_plant_of_one_value_for_all_lanes_on_a_device"
        ],
        "`fn` of a `Fold` changes shape": ["test_misuse.py::test_misuse"],
        '"scopes were not left in the reverse of the order"': [
            "test_named_scopes.py::test_scopes_that_cross"
        ],
        '"cannot mark a leaf of type"': ["test_misuse.py::test_misuse"],
        '"so it cannot contain a traced number"': ["test_misuse.py::test_misuse"],
        '"the value of … is a tracer" (`tabulate`, `compare`)': [
            "test_tabulate.py::test_tracers"
        ],
        '"so the axis of the layers is no longer known", "these arrays are not those" (`unstack`, `stack`, `axes`)': [
            "test_results.py::test_an_axis_that_was_added_outside_is_known_or_an_error"
        ],
        '"cannot tell which lanes run" (`tap`)': [
            "test_tap.py::test_lanes_that_cannot_be_told_are_an_error"
        ],
        '"The callback of `tap` raised"': [
            "test_tap.py::test_failing_callback",
            "test_tap.py::test_failing_callback_under_jit",
        ],
        '"found no mark in"': [
            "test_errors.py::test_nothing_is_marked",
            "test_errors.py::test_no_warning",
            "test_errors.py::test_all_marks_have_another_tag",
            "test_errors.py::test_marks_that_were_taken_inside",
        ],
        "TracerBoolConversionError, TracerArrayConversionError": [
            "test_errors.py::test_the_value_of_an_array_is_not_known",
            "test_capture.py::test_jit_in_either_order",
        ],
        '"Gradient only defined for scalar-output functions"': [
            "test_errors.py::test_the_gradient_of_a_loss_and_what_was_captured"
        ],
        '"Reverse-mode differentiation does not work for lax.while_loop"': [
            "test_errors.py::test_a_loss_on_what_was_captured_in_a_loop_of_equinox",
            "test_hard_cases.py::test_values_of_diffeqsolve_beside_a_gradient",
            "test_hard_cases.py::test_diffeqsolve_with_direct_adjoint",
            "test_hard_cases.py::test_values_of_an_equinox_while_loop_beside_a_gradient",
        ],
        "UnexpectedTracerError": ["test_misuse.py::test_misuse"],
        "RecursionError": ["test_misuse.py::test_misuse"],
        '"Cannot apply JAX transformations to a function lowered and compiled"': [
            "test_limits.py::test_compiled_before"
        ],
        '"Cannot serialize PyTreeDef containing an unregistered type"': [
            "test_state.py::test_export_of_a_summary"
        ],
        '"Refusing to materialise" (quax)': ["test_real_models.py::test_quax"],
        "AssertionError, and other errors from JAX itself": [
            "test_random_meshes.py::test_random_program_on_meshes"
        ],
    },
    "limits": {
        "The function is traced": [
            "test_errors.py::test_the_value_of_an_array_is_not_known",
            "test_capture.py::test_jit_in_either_order",
            "test_capture.py::test_a_dict_of_layers",
        ],
        "Functions that were traced before": [
            "test_limits.py::test_linearized_before",
            "test_hard_cases.py::test_linearized_function_captured_later",
        ],
        "The condition of a `while_loop`": [
            "test_limits.py::test_refused",
            "test_control_flow.py::test_sow_in_a_while_condition_is_refused",
        ],
        "No gradient where JAX computes none": [
            "test_laws.py::test_dependence_decides_whether_there_is_a_cotangent",
            "test_cotangents.py::test_zeros_that_do_not_leave_a_shard_map",
        ],
        "A loss on values from a solver": [
            "test_errors.py::test_a_loss_on_what_was_captured_in_a_loop_of_equinox",
            "test_hard_cases.py::test_values_of_diffeqsolve_beside_a_gradient",
            "test_hard_cases.py::test_diffeqsolve_with_direct_adjoint",
        ],
        "Derivatives inside custom rules": [
            "test_hard_cases.py::test_a_rule_that_has_another_value_than_the_function",
            "test_hard_cases.py::test_a_function_with_a_rule_that_has_no_derivative_of_its_own",
            "test_hard_cases.py::test_plant_around_another_handler_drops_the_rule",
            "test_plant.py::test_inside_custom_rules",
        ],
        "Programs that eqx_sow cannot change": [
            "test_limits.py::test_refused",
            "test_register_rule.py::test_without_a_rule",
            "test_hard_cases.py::test_custom_linear_solve",
        ],
        "`plant` within the gradient of a checkpoint": [
            "test_hard_cases.py::test_plant_in_a_checkpoint",
            "test_hard_cases.py::test_second_derivatives_of_a_checkpoint",
        ],
        "Order on several devices": [
            "test_refusals.py::test_order_counts_only_inside_a_shard_map"
        ],
        "Smaller limits": [
            "test_batched.py::test_one_that_all_branches_have_is_an_error_too",
            "test_cotangents.py::test_a_numpy_array_in_one_branch_is_an_error",
            "test_lookup.py::test_what_was_computed_with_has_no_iterations",
            "test_export.py::test_iteration_that_there_may_not_be",
            "test_patterns.py::test_lists_are_counted_from_the_end",
            "test_programs.py::test_donated",
            "test_real_models.py::test_quax",
            "test_real_models.py::test_quax_hides_the_weights",
        ],
    },
    "background/laws": {
        "Modes of JAX": [
            "test_modes.py::test_gradients",
            "test_modes.py::test_a_nan_in_a_jitted_function",
            "test_modes.py::test_no_leaks",
            "test_modes.py::test_keys_that_are_used_once",
            "test_modes.py::test_custom_rules",
        ],
    },
}
